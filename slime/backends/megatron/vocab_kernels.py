"""The two passes over all logits, as one compiled kernel each: what CUDA does instead of ``vocab_chunks``.

A kernel reads every logit once, in its own dtype, and keeps what it makes of it in registers; so there are no buffers
to bound, and no pass waits for memory more than once. Owns the same two passes as ``vocab_chunks`` with the
same results. Compiled at first use, in a few seconds each. Tests hold: equal to float64, as the chunks are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.backends.megatron.compiled import ForAnyLength
from slime.backends.megatron.vocab_chunks import LOWEST, RowStatistics

KERNEL_ELEMENTS = 1 << 30
"""Logits per call: places in them fit 32 bits, which makes faster kernels, and one kernel serves all sizes."""


class VocabKernels:
    """Both passes.

    Args:
        compiled: False runs the same operations one by one, e.g. on a CPU.
    """

    def __init__(self, *, compiled: bool) -> None:
        self._sums = ForAnyLength(_sums) if compiled else _sums
        self._weighted_sums = ForAnyLength(_weighted_sums) if compiled else _weighted_sums
        self._gradient = ForAnyLength(_gradient_in_place) if compiled else _gradient_in_place
        self._entropy_gradient = ForAnyLength(_entropy_gradient_in_place) if compiled else _entropy_gradient_in_place

    def row_statistics(self, logits: Tensor, peak: Tensor, *, scale: float, with_weighted: bool) -> RowStatistics:
        """As ``vocab_chunks.row_statistics``."""
        total = torch.empty_like(peak)
        weighted = torch.empty_like(peak) if with_weighted else None
        for span in _spans(logits):
            if weighted is None:
                total[span] = self._sums(logits[span], peak[span], scale)
            else:
                total[span], weighted[span] = self._weighted_sums(logits[span], peak[span], scale)
        return RowStatistics(total=total, weighted=weighted)

    def gradient_in_place(
        self,
        logits: Tensor,
        log_normaliser: Tensor,
        row_totals: Tensor,
        entropy: tuple[Tensor, Tensor] | None,
        *,
        scale: float,
    ) -> None:
        """Write the gradient that ``vocab_chunks.softmax_gradient`` yields, times ``scale``, over the logits."""
        for span in _spans(logits):
            if entropy is None:
                self._gradient(logits[span], log_normaliser[span], row_totals[span], scale)
            else:
                value, gradient = entropy[0][span], entropy[1][span]
                self._entropy_gradient(logits[span], log_normaliser[span], row_totals[span], value, gradient, scale)


def chosen_gradient(
    chosen: Tensor,
    places: tuple[Tensor, Tensor],
    values: Tensor,
    log_normaliser: Tensor,
    row_totals: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient of the scaled logits at the chosen places, in full precision.

    Args:
        chosen: ``[R]`` the scaled logits there.
        places: ``[R]`` each, row and column; a place may be chosen several times.
        values: ``[R]`` gradients of the chosen log-probs.
        log_normaliser: ``[U]``.
        row_totals: ``[U]`` sum of the values of each row.
        entropy: ``[U]`` each, entropies and the gradients of them; None when no loss uses them.

    Returns:
        ``[R]``; the same at places that are the same.
    """
    rows, columns = places
    width = 1 + columns.max() if len(columns) else 1
    _, group = torch.unique(rows * width + columns, return_inverse=True)
    together = values.new_zeros(len(values)).index_add_(0, group, values).index_select(0, group)
    log_prob = chosen - log_normaliser.index_select(0, rows)
    slope = row_totals.index_select(0, rows)
    if entropy is not None:
        value, gradient = (part.index_select(0, rows) for part in entropy)
        slope = slope + gradient * (log_prob.clamp(min=LOWEST) + value)
    return together - log_prob.exp() * slope


def _spans(logits: Tensor) -> list[slice]:
    size = max(1, KERNEL_ELEMENTS // max(logits.size(1), 1))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _sums(logits: Tensor, peak: Tensor, scale: float) -> Tensor:
    return (logits.to(peak.dtype) * scale - peak[:, None]).exp().sum(1)


def _weighted_sums(logits: Tensor, peak: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    above = logits.to(peak.dtype) * scale - peak[:, None]
    e = above.exp()
    return e.sum(1), (e * above.clamp(min=LOWEST)).sum(1)


def _gradient_in_place(logits: Tensor, log_normaliser: Tensor, row_totals: Tensor, scale: float) -> None:
    p = (logits.to(log_normaliser.dtype) * scale - log_normaliser[:, None]).exp()
    logits.copy_(p * (-row_totals[:, None]) * scale)


def _entropy_gradient_in_place(
    logits: Tensor, log_normaliser: Tensor, row_totals: Tensor, value: Tensor, gradient: Tensor, scale: float
) -> None:
    log_prob = logits.to(log_normaliser.dtype) * scale - log_normaliser[:, None]
    slope = (log_prob.clamp(min=LOWEST) + value[:, None]) * gradient[:, None] + row_totals[:, None]
    logits.copy_(-log_prob.exp() * slope * scale)
