"""Corrections for the gap between the engine that sampled and the trainer that scores.

Both multiply the policy loss by the importance weight trainer / engine and differ in what
happens to extreme weights. Leaves out the masks and the reduction. Tests hold: weights equal
their float64 formula; a masked infinity does not poison the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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


def truncated_importance(low: float, high: float) -> Correction:
    """Truncated importance sampling: clamp the weight to [low, high].

    See https://fengyao.notion.site/off-policy-rl. Metrics: ``tis`` the raw weight, ``tis_clipfrac``
    the share of clamped ones, ``tis_abs`` the distance of the raw weight from 1.
    """

    def correct(loss: Tensor, gap: EngineGap) -> Corrected:
        weight = torch.exp(gap.trainer - gap.engine)
        clamped = weight.clamp(low, high)
        return Corrected(loss=loss * clamped, metrics=_weight_metrics(weight, clamped != weight))

    return correct


def icepop(low: float, high: float) -> Correction:
    """IcePop: drop tokens (weight 0) whose importance weight lies outside [low, high].

    See https://ringtech.notion.site/icepop. The metrics are those of ``truncated_importance``.
    """

    def correct(loss: Tensor, gap: EngineGap) -> Corrected:
        weight = torch.exp(gap.trainer - gap.engine)
        outside = (weight < low) | (weight > high)
        kept = torch.where(outside, torch.zeros_like(weight), weight)
        return Corrected(loss=loss * kept, dropped=outside.float(), metrics=_weight_metrics(weight, outside))

    return correct


def _weight_metrics(weight: Tensor, changed: Tensor) -> dict[str, Tensor]:
    return {"tis": weight, "tis_clipfrac": changed.float(), "tis_abs": (weight - 1).abs()}
