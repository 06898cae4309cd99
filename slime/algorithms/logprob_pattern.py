"""The pattern in which trainer and engine log-probs differ: what tells one cause from another.

Owns sums over response tokens and what is read from them; reduction over ranks is the caller's, and judging is
``observability.logprob_diagnosis``'s. Tests hold: any split of the tokens gives the same pattern; each planted
cause shows the pattern that is described here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EARLY_TOKENS = 4
"""The first tokens of a response, which depend on the prompt most."""

_SUMS = ("tokens", "abs", "signed", "early", "early_abs", "late", "late_abs", "x_x", "x_d", "d_d")
NUM_SUMS = len(_SUMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferencePattern:
    """How engine and trainer log-probs of one rollout differ; ``d`` is engine minus trainer.

    Args:
        mean: Mean of ``|d|``.
        largest: Maximum of ``|d|``.
        one_sidedness: Mean of ``d`` over ``mean``: 0 for noise, 1 where the engine's are always larger.
        early: Mean of ``|d|`` over the first tokens of the responses.
        late: Likewise over their second halves.
        temperature_ratio: Trainer's over engine's temperature that explains most of ``d``.
        temperature_fit: Share of ``d``'s squares that it explains, 0 to 1.
    """

    mean: float
    largest: float
    one_sidedness: float
    early: float
    late: float
    temperature_ratio: float
    temperature_fit: float


def pattern_sums(
    trainer: Tensor, engine: Tensor, entropy: Tensor | None, mask: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Sums over the unmasked tokens.

    To first order another temperature changes a log-prob by ``(T / T' - 1) (log p + H)``, because the derivative
    of ``log p`` with respect to ``1 / T`` is the logit minus its mean, which is ``T (log p + H)``. Hence the
    sums of a regression of ``d`` on ``log p + H``.

    Args:
        trainer: ``[R]`` log-probs of the trainer, sample after sample.
        engine: ``[R]`` log-probs of the engine.
        entropy: ``[R]`` entropies of the trainer's distributions; None leaves the regression out.
        mask: ``[R]``; what is masked may hold anything.
        lengths: N response lengths.

    Returns:
        ``[NUM_SUMS]`` and the maximum of ``|d|``, both float64; the first are added, the second maximised.
    """
    kept = mask.bool()
    position = torch.cat([torch.arange(n, device=mask.device) for n in lengths] or [mask.long()])
    half = torch.cat([torch.full((n,), max(n // 2, EARLY_TOKENS), device=mask.device) for n in lengths] or [position])
    d = (engine.double() - trainer.double())[kept]
    x = torch.zeros_like(d) if entropy is None else (trainer.double() + entropy.double())[kept]
    is_early, is_late = (position < EARLY_TOKENS)[kept], (position >= half)[kept]
    size = d.abs()
    rows = [
        torch.ones_like(d), size, d, is_early.double(), size * is_early, is_late.double(), size * is_late,
        x * x, x * d, d * d,
    ]  # fmt: skip
    largest = size.amax() if len(size) else torch.zeros((), dtype=torch.float64, device=mask.device)
    return torch.stack([row.sum() for row in rows]), largest


def read_pattern(sums: Sequence[float], largest: float) -> DifferencePattern:
    """The pattern behind the summed sums of all tokens."""
    total = dict(zip(_SUMS, sums, strict=True))

    def ratio(numerator: float, denominator: float) -> float:
        return numerator / denominator if denominator else 0.0

    slope = ratio(total["x_d"], total["x_x"])
    return DifferencePattern(
        mean=ratio(total["abs"], total["tokens"]),
        largest=largest,
        one_sidedness=ratio(total["signed"], total["abs"]),
        early=ratio(total["early_abs"], total["early"]),
        late=ratio(total["late_abs"], total["late"]),
        temperature_ratio=1.0 + slope,
        temperature_fit=min(1.0, ratio(total["x_d"] ** 2, total["x_x"] * total["d_d"])),
    )


def is_noise(pattern: DifferencePattern) -> bool:
    """Whether differences look like rounding: both signs alike, equal along the response, no temperature, small."""
    steady = 0.5 < pattern.early / pattern.late < 2.0 if pattern.late and pattern.early else True
    small = math.isfinite(pattern.mean) and pattern.mean < 0.1
    return small and steady and abs(pattern.one_sidedness) < 0.25 and pattern.temperature_fit < 0.3
