"""Passes over logits by chunks of rows, in buffers whose size is stated and that are used again.

Owns the two passes that touch every element: the statistics of each row, and the gradient. Beside the
logits and a few numbers per row, no more than ``chunk * V / tp`` elements of the accumulating dtype exist
at any time, whatever is asked; a test counts the bytes. Knows nothing of targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST = -1e30
"""Times a probability of 0 it gives 0, which minus infinity does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """Of each of U rows over the columns at hand: all ``[U]``.

    Args:
        total: Sum of the exponentials above the peak.
        weighted: Sum of exponential times distance to the peak; None when not asked for.
    """

    total: Tensor
    weighted: Tensor | None


class RowChunks:
    """Walks over logits ``[U, n]`` in fp32 (or float64), some rows at a time.

    Args:
        logits: ``[U, n]`` any float dtype; read, never changed.
        scale: Multiplies the logits.
        dtype: Of the buffers.
        chunk: Rows whose buffers may exist at a time; with several buffers fewer rows are in hand.
        num_buffers: Buffers the pass needs for a row.
    """

    def __init__(self, logits: Tensor, *, scale: float, dtype: torch.dtype, chunk: int, num_buffers: int) -> None:
        self._logits = logits
        self._scale = scale
        self.size = min(max(1, chunk // num_buffers), max(len(logits), 1))
        shape = (num_buffers, self.size, logits.size(1))
        self._buffers = torch.empty(shape, dtype=dtype, device=logits.device)

    def above(self, floor: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Scaled logits minus a number per row.

        Args:
            floor: ``[U]`` subtracted from each row.

        Yields:
            The rows, ``[C, n]`` the differences in a buffer of the caller's, and ``[C, n]`` its last buffer,
            which is the same one when there is only one.
        """
        for start in range(0, len(self._logits), self.size):
            span = slice(start, min(start + self.size, len(self._logits)))
            z = self._buffers[0, : span.stop - start]
            z.copy_(self._logits[span])
            if self._scale != 1.0:
                z.mul_(self._scale)
            yield span, z.sub_(floor[span, None]), self._buffers[-1, : span.stop - start]


def row_statistics(logits: Tensor, peak: Tensor, *, scale: float, chunk: int, with_weighted: bool) -> RowStatistics:
    """Sums over the columns of each row, relative to ``peak``.

    Args:
        logits: ``[U, n]``.
        peak: ``[U]`` a number no scaled logit of the row is above, in the accumulating dtype.
        scale: Multiplies the logits.
        chunk: Rows whose buffers may exist at a time.
        with_weighted: Whether the weighted sum is needed, for an entropy.
    """
    total = torch.empty_like(peak)
    weighted = torch.empty_like(peak) if with_weighted else None
    chunks = RowChunks(logits, scale=scale, dtype=peak.dtype, chunk=chunk, num_buffers=2 if with_weighted else 1)
    for span, z, e in chunks.above(peak):
        torch.exp(z, out=e)
        torch.sum(e, dim=1, out=total[span])
        if weighted is not None:
            torch.sum(e.mul_(z.clamp_(min=LOWEST)), dim=1, out=weighted[span])
    return RowStatistics(total=total, weighted=weighted)


def softmax_gradient(
    logits: Tensor,
    log_normaliser: Tensor,
    row_totals: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    chunk: int,
) -> Iterator[tuple[slice, Tensor]]:
    """The part of the gradient that every column has, of the scaled logits.

    That of ``sum_r g_r log p_r + sum_u h_u H_u`` is ``-p (g + h (log p + H))`` at each column, plus g at
    the chosen ones, which the caller adds.

    Args:
        logits: ``[U, n]``.
        log_normaliser: ``[U]``.
        row_totals: ``[U]`` sum of the g of each row.
        entropy: ``[U]`` each, the entropies and the gradients h of them; None when no loss uses them.
        scale: Multiplies the logits.
        chunk: Rows whose buffers may exist at a time.

    Yields:
        The rows and ``[C, n]`` their gradient, in a buffer that the next step overwrites.
    """
    num_buffers = 1 if entropy is None else 2
    chunks = RowChunks(logits, scale=scale, dtype=log_normaliser.dtype, chunk=chunk, num_buffers=num_buffers)
    for span, z, p in chunks.above(log_normaliser):
        torch.exp(z, out=p)
        if entropy is None:
            yield span, p.mul_(-row_totals[span, None])
            continue
        value, gradient = entropy[0][span, None], entropy[1][span, None]
        slope = z.clamp_(min=LOWEST).add_(value).mul_(gradient).add_(row_totals[span, None])
        yield span, slope.mul_(p).neg_()
