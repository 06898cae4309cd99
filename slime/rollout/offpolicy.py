"""Tokens of older weights out of the loss: ``--mask-offpolicy-in-partial-rollout``.

Two kinds: what a resumed sample brings from an earlier rollout, and what an engine generated before the weights changed
in the middle of a sample. Tokens that are known to be of the newest weights stay in, whichever rollout made them.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.types import Sample


@dataclass(frozen=True, slots=True)
class EarlierResponse:
    """What a resumed sample had before this rollout: all its tokens, and the loss mask of its response."""

    tokens: list[int]
    loss_mask: list[int]

    def mask_in(self, sample: Sample) -> list[int]:
        """The loss mask, if ``sample`` continues that response; none if it started again."""
        return self.loss_mask if sample.tokens[: len(self.tokens)] == self.tokens else []


NOTHING_EARLIER = EarlierResponse([], [])


def mask_earlier_tokens(sample: Sample) -> EarlierResponse:
    """Take the response so far, which an earlier rollout made, out of the loss; returns what it was."""
    mask = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
    sample.loss_mask = [0] * sample.response_length
    return EarlierResponse(list(sample.tokens), mask)


def mask_older_tokens(sample: Sample, earlier: EarlierResponse = NOTHING_EARLIER) -> None:
    """Take tokens of weights older than the newest of the sample out of the loss.

    Args:
        sample: After generation; unchanged if nobody recorded its weight versions.
        earlier: What ``mask_earlier_tokens`` returned: its tokens that are of the newest weights get their mask back.
    """
    spans, before = sample.weight_version_spans, earlier.mask_in(sample)
    if not spans or sample.loss_mask is None or spans[-1].end <= len(before):
        return  # nothing was generated since: which weights are the newest is not known
    newest = spans[-1].version
    mask = list(sample.loss_mask)
    for span in spans:
        for position in range(span.start, min(span.end, len(mask))):
            if span.version != newest:
                mask[position] = 0
            elif position < len(before):
                mask[position] = before[position]
    sample.loss_mask = mask
