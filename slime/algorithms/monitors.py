"""What is always measured beside the loss: distance of trainer and engine, ratio extremes, a quantile.

Everything here is a sum, an extreme or a histogram of one micro-batch, so that micro-batches and
ranks combine without an approximation: histograms have fixed bins and are added. Leaves out the
reduction itself. Tests hold: any split gives the same result; the quantile of a histogram lies
within ``RELATIVE_RESOLUTION`` of the sorted value's; masked tokens never count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.kl import approx_kl
from slime.algorithms.reduction import TokenReducer

_LOWEST_DECADE, _HIGHEST_DECADE = -7, 3
_BINS_PER_DECADE = 128
_INNER_BINS = (_HIGHEST_DECADE - _LOWEST_DECADE) * _BINS_PER_DECADE

NUM_BINS = _INNER_BINS + 2
"""Bins of a histogram: below 1e-7, 128 per decade, above 1e3 (where NaN counts too)."""

RELATIVE_RESOLUTION = 10 ** (0.5 / _BINS_PER_DECADE) - 1
"""A quantile is the geometric centre of its bin: at most this share (0.9 %) off."""

ABS_DIFF = "train_rollout_logprob_abs_diff"


def log_histogram(values: Tensor, mask: Tensor) -> Tensor:
    """Count magnitudes in fixed logarithmic bins.

    Args:
        values: ``[R]``, not negative.
        mask: ``[R]``; tokens where it is 0 do not count.

    Returns:
        ``[NUM_BINS]`` int64.
    """
    place = torch.floor((torch.log10(values.double()) - _LOWEST_DECADE) * _BINS_PER_DECADE) + 1
    bins = torch.nan_to_num(place, nan=NUM_BINS - 1.0).clamp(0, NUM_BINS - 1).long()
    # Masked tokens go to a bin of their own, which is cut off: no data-dependent shape, no synchronisation.
    bins = torch.where(mask.bool(), bins, NUM_BINS)
    return torch.bincount(bins, minlength=NUM_BINS + 1)[:NUM_BINS]


def quantile_of(counts: Sequence[float], q: float) -> float | None:
    """The ``q`` quantile of a histogram: of its n sorted values, number ``ceil(q * n)``.

    Returns:
        The centre of the value's bin; 0 below the lowest bin, infinity above the highest, None for
        an empty histogram.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank, seen = math.ceil(q * total), 0.0
    index = len(counts) - 1
    for index, count in enumerate(counts):  # noqa: B007
        seen += count
        if seen >= rank:
            break
    if index == 0:
        return 0.0
    if index == NUM_BINS - 1:
        return math.inf
    return 10 ** (_LOWEST_DECADE + (index - 0.5) / _BINS_PER_DECADE)


def extremes(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest unmasked value; infinity and -infinity where nothing is unmasked. ``[R]`` to scalars."""
    infinity = torch.full((), math.inf, dtype=torch.float64, device=values.device)
    kept, wide = mask.bool(), values.double()
    if not len(values):
        return infinity, -infinity
    return torch.where(kept, wide, infinity).amin(), torch.where(kept, wide, -infinity).amax()


def engine_sums(trainer_log_probs: Tensor, engine_log_probs: Tensor, reducer: TokenReducer) -> dict[str, Tensor]:
    """Mean distance of trainer and engine: absolute, and two estimates of KL(engine || trainer).

    The tokens were sampled by the engine, so k1 is ``engine - trainer`` and k3 its non-negative
    relative (http://joschu.net/blog/kl-approx.html).

    Args:
        trainer_log_probs: ``[R]``, without gradient, 0 where masked.
        engine_log_probs: ``[R]``, likewise.
        reducer: How a mean weighs tokens.
    """
    return {
        ABS_DIFF: reducer((trainer_log_probs - engine_log_probs).abs()),
        "train_rollout_kl_k1": reducer(approx_kl(engine_log_probs, trainer_log_probs, "k1")),
        "train_rollout_kl_k3": reducer(approx_kl(engine_log_probs, trainer_log_probs, "k3")),
    }
