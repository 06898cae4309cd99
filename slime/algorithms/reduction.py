"""Sums over tokens: per sample, per rollout, per token, and masked whitening.

A loss returns sums. Whoever runs it divides by a global denominator that was known before the
first micro-batch, so the result does not depend on how the work was split. Response tokens of a
micro-batch lie flat in one ``[R]`` tensor, sample after sample; ``lengths`` says where each ends.

Leaves out the denominators themselves and every process group: a caller that shards tokens
passes an ``all_reduce`` callable. Tests hold: any split of the samples gives the same sum; values
at masked positions, infinite or not a number, never reach the result or the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Sum a tensor over the ranks that hold the other tokens; returns the sum."""


def _local_only(x: Tensor) -> Tensor:
    return x


def blank_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Replace masked-out entries by 0, so that an infinity there stays out of value and gradient.

    Args:
        x: ``[R]`` any float dtype.
        mask: ``[R]``; entries that are 0 (or False) are blanked.
    """
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def split_spans(x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Each sample's span of a flat ``[R]`` tensor, as views."""
    return torch.functional.split(x, list(lengths))


def segment_sums(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum each sample's span of a flat tensor.

    Args:
        x: ``[R]``.
        lengths: N span lengths, summing to R; zero is allowed.

    Returns:
        ``[N]``.
    """
    if not lengths:
        return x.new_zeros(0)
    return torch.stack([span.sum() for span in split_spans(x, lengths)])


def spread(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeat one value per sample over the sample's tokens: ``[N]`` to ``[R]``."""
    counts = torch.tensor(list(lengths), dtype=torch.long, device=values.device)
    return values.repeat_interleave(counts, output_size=sum(lengths))


def segment_means(x: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """Masked mean of each sample's span; 0 for a fully masked one. ``[R]`` to ``[N]``."""
    total = segment_sums(blank_masked(x, mask), lengths)
    count = segment_sums(mask.to(x.dtype), lengths)
    return total / count.clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReducer:
    """Weighted sum of token values: each rollout weighs 1, each token does, or each is divided by a constant.

    Args:
        mask: ``[R]`` float, 1 where a token counts.
        denominators: ``[R]`` float, what a token's value is divided by: the mask sum of its whole
            rollout (at least 1), 1 for token-level weighting, or the constant.
    """

    mask: Tensor
    denominators: Tensor

    @classmethod
    def per_rollout(cls, mask: Tensor, rollout_mask_sums: Sequence[float], lengths: Sequence[int]) -> TokenReducer:
        """Each rollout weighs 1, however many samples and micro-batches it is spread over.

        Args:
            mask: ``[R]``.
            rollout_mask_sums: N sums of the masks over *all* samples of the sample's rollout.
            lengths: N response lengths, summing to R.
        """
        sums = torch.tensor(list(rollout_mask_sums), dtype=mask.dtype, device=mask.device).clamp(min=1)
        return cls(mask=mask, denominators=spread(sums, lengths))

    @classmethod
    def per_token(cls, mask: Tensor) -> TokenReducer:
        """Each unmasked token weighs 1."""
        return cls(mask=mask, denominators=torch.ones_like(mask))

    @classmethod
    def constant(cls, mask: Tensor, denominator: float) -> TokenReducer:
        """Dr. GRPO: token sums over a constant, so that no response's weight depends on its length.

        Paper: https://arxiv.org/abs/2503.20783.
        """
        return cls(mask=mask, denominators=torch.full_like(mask, denominator))

    def __call__(self, x: Tensor) -> Tensor:
        """Weighted sum of ``x`` ``[R]``; a scalar in the dtype of ``x`` (at least float32)."""
        return (blank_masked(x, self.mask) * (self.mask / self.denominators)).sum()

    def with_mask(self, mask: Tensor) -> TokenReducer:
        """Same denominators, other numerator: what rejection of tokens after sampling needs."""
        return TokenReducer(mask=mask.to(self.denominators.dtype), denominators=self.denominators)


def whiten(
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    all_reduce: AllReduce = _local_only,
    epsilon: float = 1e-8,
) -> list[Tensor]:
    """Shift and scale to masked mean 0 and unbiased masked variance 1.

    The statistics are taken over every sample on every rank that takes part in ``all_reduce``
    (which makes this a collective over that group).

    Args:
        advantages: N x ``[R_i]``.
        masks: N x ``[R_i]``, 1 where a token counts.
        all_reduce: Sum over the ranks that hold the other samples.
        epsilon: Added to the variance.

    Returns:
        N x ``[R_i]`` in the dtype of the input; masked-out tokens get the same affine map, or 0
        where the input was not finite.
    """
    device = advantages[0].device if advantages else torch.device("cpu")
    flat = torch.cat(list(advantages)).double() if advantages else torch.zeros(0, dtype=torch.float64, device=device)
    mask = torch.cat(list(masks)).double() if masks else torch.zeros(0, dtype=torch.float64, device=device)
    flat = torch.where(torch.isfinite(flat) | mask.bool(), flat, torch.zeros_like(flat))
    count, total = all_reduce(torch.stack([mask.sum(), (blank_masked(flat, mask) * mask).sum()])).unbind()
    mean = total / count.clamp(min=1)
    # Two passes: the difference of squares loses all digits when the mean dwarfs the spread.
    squares = all_reduce((blank_masked(flat - mean, mask).square() * mask).sum())
    variance = squares / (count - 1).clamp(min=1)
    scaled = (flat - mean) * (variance + epsilon).rsqrt()
    lengths = [len(a) for a in advantages]
    spans = split_spans(scaled, lengths) if lengths else ()
    return [span.to(a.dtype) for span, a in zip(spans, advantages, strict=True)]
