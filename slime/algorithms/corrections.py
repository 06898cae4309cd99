"""Corrections for the gap between the engine that sampled and the trainer that scores.

Both multiply the policy loss by the importance weight trainer / engine and differ in what
happens to extreme weights. Leaves out the masks and the reduction. Tests hold: weights equal
their float64 formula; a masked infinity does not poison the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A corrected loss.

    Args:
        loss: ``[R]`` policy loss after weighting.
        mask: ``[R]`` tokens that stay in the numerator; None keeps the loss mask.
        metrics: name -> ``[R]`` values, reduced with the original mask.
    """

    loss: Tensor
    mask: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


Correction = Callable[[Tensor, Tensor, Tensor], Corrected]
"""``(policy loss [R], trainer log-probs [R], engine log-probs [R]) -> Corrected``; no gradient flows to the weights."""


def truncated_importance(low: float, high: float) -> Correction:
    """Truncated importance sampling: clamp the weight to [low, high].

    See https://fengyao.notion.site/off-policy-rl. Metrics: ``tis`` the raw weight, ``tis_clipfrac``
    the share of clamped ones, ``tis_abs`` the distance of the raw weight from 1.
    """

    def correct(loss: Tensor, trainer_log_probs: Tensor, engine_log_probs: Tensor) -> Corrected:
        weight = torch.exp(trainer_log_probs - engine_log_probs).detach()
        clamped = weight.clamp(low, high)
        return Corrected(loss=loss * clamped, metrics=_weight_metrics(weight, clamped != weight))

    return correct


def icepop(low: float, high: float) -> Correction:
    """IcePop: drop tokens (weight 0) whose importance weight lies outside [low, high].

    See https://ringtech.notion.site/icepop. The metrics are those of ``truncated_importance``.
    """

    def correct(loss: Tensor, trainer_log_probs: Tensor, engine_log_probs: Tensor) -> Corrected:
        weight = torch.exp(trainer_log_probs - engine_log_probs).detach()
        outside = (weight < low) | (weight > high)
        kept = torch.where(outside, torch.zeros_like(weight), weight)
        return Corrected(loss=loss * kept, metrics=_weight_metrics(weight, outside))

    return correct


def _weight_metrics(weight: Tensor, changed: Tensor) -> dict[str, Tensor]:
    return {"tis": weight, "tis_clipfrac": changed.float(), "tis_abs": (weight - 1).abs()}
