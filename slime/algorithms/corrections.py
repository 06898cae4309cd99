"""Corrections for the gap between the engine that sampled and the trainer that scores.

Importance weights trainer / engine multiply the policy loss (TIS, IcePop, MIS); rejection takes
tokens out of the loss. Both work on tokens or on whole sequences; a sequence is one sample. Leaves
out the reduction: a rejected token leaves the numerator, never the denominator. Tests hold: every
combination equals a float64 reference; a masked infinity does not poison the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from slime.algorithms.reduction import blank_masked, segment_means, segment_sums, spread

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to this before they are exponentiated."""

Level = Literal["token", "sequence", "geometric"]
"""What a ratio is taken of: a token; the product over a sequence; its geometric mean."""

WeightMode = Literal["clip", "mask", "zero"]
"""What happens to weights outside the bounds: moved to the bound; taken out of the loss with all its
terms; set to 0 in the policy term (IcePop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGap:
    """Response tokens of a micro-batch as trainer and engine score them; no gradient, 0 where masked.

    Args:
        trainer: ``[R]`` log-probs of the policy before the update.
        engine: ``[R]`` log-probs of the engine that sampled the tokens.
        mask: ``[R]`` loss mask.
        lengths: N response lengths, summing to R.
    """

    trainer: Tensor
    engine: Tensor
    mask: Tensor
    lengths: Sequence[int]

    def ratios(self, level: Level) -> Tensor:
        """``[R]`` ratio trainer / engine of every token or of its sequence, which spans its trained tokens."""
        log_ratio = blank_masked(self.trainer - self.engine, self.mask)
        if level == "sequence":
            log_ratio = spread(segment_sums(log_ratio, self.lengths), self.lengths)
        elif level == "geometric":
            log_ratio = spread(segment_means(log_ratio, self.mask, self.lengths), self.lengths)
        return torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A corrected loss.

    Args:
        loss: ``[R]`` policy loss after weighting.
        mask: ``[R]`` tokens that stay in the numerator; None keeps the loss mask.
        dropped: ``[R]`` indicator of tokens that stay in the mask with weight 0; None for none.
        metrics: name -> ``[R]`` values, reduced with the original mask.
    """

    loss: Tensor
    mask: Tensor | None = None
    dropped: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


Correction = Callable[[Tensor, EngineGap], Corrected]
"""``(policy loss [R], gap) -> Corrected``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """Importance weights: what they are taken of, their bounds, what happens outside."""

    low: float
    high: float
    level: Level = "token"
    mode: WeightMode = "clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Which tokens leave the loss.

    Args:
        low: Ratios below are rejected.
        high: Ratios above are rejected.
        level: What the ratio is taken of.
        veto: One token of a sequence with a ratio below this rejects the whole sequence; None for never.
    """

    low: float
    high: float
    level: Level = "token"
    veto: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a micro-batch, ``[R]`` each.

    Args:
        raw: Before the bounds.
        bounded: What the loss is multiplied with, before batch normalisation.
        outside: Indicator of raw weights beyond a bound.
        kept: Loss mask without the tokens that ``mask`` mode and rejection take out.
        rejected: Tokens outside the bounds of the rejection.
        vetoed: Tokens of sequences with a vetoed token.
    """

    raw: Tensor
    bounded: Tensor
    outside: Tensor
    kept: Tensor
    rejected: Tensor
    vetoed: Tensor


def engine_weights(gap: EngineGap, weighting: Weighting | None, rejection: Rejection | None) -> Weights:
    """Importance weights and what is left of the loss mask.

    Papers: https://fengyao.notion.site/off-policy-rl (truncation), https://arxiv.org/abs/2510.18855
    (IcePop, mode ``zero``), https://richardli.xyz/rl-collapse (sequence level, masks, rejection and veto).

    Args:
        gap: The micro-batch.
        weighting: None gives weights of 1.
        rejection: None rejects nothing.
    """
    trained = gap.mask.bool()
    nothing = torch.zeros_like(trained)
    raw, outside, rejected, vetoed = torch.ones_like(gap.mask), nothing, nothing, nothing
    bounded, kept = raw, trained
    if weighting is not None:
        raw = gap.ratios(weighting.level)
        outside = trained & ((raw < weighting.low) | (raw > weighting.high))
        bounded = raw.clamp(weighting.low, weighting.high) if weighting.mode == "clip" else raw
        if weighting.mode == "zero":
            bounded = torch.where(outside, torch.zeros_like(raw), raw)
        elif weighting.mode == "mask":
            kept = kept & ~outside
    if rejection is not None:
        ratio = gap.ratios(rejection.level)
        rejected = trained & ((ratio < rejection.low) | (ratio > rejection.high))
        if rejection.veto is not None:
            low = (trained & (gap.ratios("token") < rejection.veto)).to(gap.mask.dtype)
            vetoed = trained & (spread(segment_sums(low, gap.lengths), gap.lengths) > 0)
        kept = kept & ~rejected & ~vetoed
    dtype = gap.mask.dtype
    return Weights(
        raw=raw,
        bounded=bounded,
        outside=outside.to(dtype),
        kept=kept.to(dtype),
        rejected=rejected.to(dtype),
        vetoed=vetoed.to(dtype),
    )


def engine_correction(
    weighting: Weighting | None, rejection: Rejection | None = None, *, normaliser: float = 1.0, measure: bool = False
) -> Correction:
    """The built-in correction.

    Args:
        weighting: Importance weights; None leaves the loss unweighted.
        rejection: Tokens to take out; None takes none.
        normaliser: Divides the weights: their mean over the rollout, or 1.
        measure: Leave the loss alone and add perplexities to the metrics.

    Returns:
        A correction with the metrics ``tis`` (raw weight), ``tis_clipfrac`` (share outside the
        bounds), ``tis_abs`` (distance of the raw weight from 1), ``rs_frac`` and ``rs_veto_frac``.
    """

    def correct(loss: Tensor, gap: EngineGap) -> Corrected:
        weights = engine_weights(gap, weighting, rejection)
        metrics: dict[str, Tensor] = {}
        if weighting is not None:
            metrics |= {"tis": weights.raw, "tis_clipfrac": weights.outside, "tis_abs": (weights.raw - 1).abs()}
        if rejection is not None:
            metrics |= {"rs_frac": weights.rejected}
            if rejection.veto is not None:
                metrics |= {"rs_veto_frac": weights.vetoed}
        if measure:
            return Corrected(loss=loss, metrics=metrics | perplexities(gap))
        dropped = weights.outside if weighting is not None and weighting.mode == "zero" else None
        if weighting is not None:
            loss = loss * (weights.bounded / normaliser)
        return Corrected(loss=loss, mask=weights.kept, dropped=dropped, metrics=metrics)

    return correct


def truncated_importance(low: float, high: float) -> Correction:
    """Truncated importance sampling: clamp each token's weight to [low, high]."""
    return engine_correction(Weighting(low=low, high=high))


def icepop(low: float, high: float) -> Correction:
    """IcePop: the policy term of tokens whose weight lies outside [low, high] gets weight 0."""
    return engine_correction(Weighting(low=low, high=high, mode="zero"))


def weight_total(gap: EngineGap, weighting: Weighting, rejection: Rejection | None) -> Tensor:
    """What the mean weight is made of: sum of bounded weights, and their number.

    Counted over the tokens that stay in the loss, or at sequence levels over the sequences that
    have any.

    Returns:
        ``[2]`` float64.
    """
    weights = engine_weights(gap, weighting, rejection)
    kept, bounded = weights.kept.double(), weights.bounded.double()
    if weighting.level != "token":
        # One weight per sequence: the mean over its tokens is that weight.
        bounded = segment_means(bounded, kept, gap.lengths)
        kept = (segment_sums(kept, gap.lengths) > 0).double()
    return torch.stack([(bounded * kept).sum(), kept.sum()])


def perplexities(gap: EngineGap) -> dict[str, Tensor]:
    """Perplexity of each sequence under trainer and engine, on every token of it: name -> ``[R]``."""
    trainer, engine = (
        -spread(segment_means(log_probs, gap.mask, gap.lengths), gap.lengths) for log_probs in (gap.trainer, gap.engine)
    )
    return {
        "train_log_ppl": trainer,
        "rollout_log_ppl": engine,
        "train_ppl": torch.exp(trainer),
        "rollout_ppl": torch.exp(engine),
        "log_ppl_diff": trainer - engine,
        "log_ppl_abs_diff": (trainer - engine).abs(),
        "ppl_ratio": torch.exp(trainer - engine),
    }
