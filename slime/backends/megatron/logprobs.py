"""Log-probs and entropy of chosen tokens from vocabulary-parallel logits.

Works in fp32 on chunks of rows (``vocab_chunks``): besides the logits themselves only per-row scalars
outlive the forward, so that no second full copy of the logits exists, and the backward may write the
gradient over them. Owns nothing of the model; a row of logits may serve several tokens (continuations of
one prompt). Tests hold: values and gradients equal a float64 ``log_softmax`` for any chunk size and any
split of the vocabulary over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from slime.backends.megatron.vocab_chunks import row_statistics, softmax_gradient

# Rows per chunk when none is asked for: temporaries stay in the cache of a CPU core, and on a GPU are
# large enough to keep it busy.
AUTO_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The vocabulary columns this rank holds.

    Args:
        start: Token id of column 0.
        num_valid: Columns that are real tokens; the rest is padding and takes part in nothing.
        group: Ranks that hold the other columns; None when there are none.
    """

    start: int
    num_valid: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, vocab_size: int, num_columns: int, rank: int = 0, group: dist.ProcessGroup | None = None) -> VocabShard:
        """Shard ``rank`` of a vocabulary padded to equal shards of ``num_columns``."""
        start = rank * num_columns
        return cls(start=start, num_valid=min(max(vocab_size - start, 0), num_columns), group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """``log_probs`` ``[R]`` float32 of the chosen tokens; ``entropy`` ``[R]`` float32 when asked for."""

    log_probs: Tensor
    entropy: Tensor | None = None


def score_tokens(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = -1,
    with_entropy: bool = False,
    reuse_logits: bool = False,
) -> TokenScores:
    """Score chosen tokens. Collective over ``shard.group`` in the forward only.

    Args:
        logits: ``[U, V/tp]`` any float dtype.
        targets: ``[R]`` int64 global token ids.
        shard: The columns of ``logits``.
        rows: ``[R]`` int64 row of ``logits`` that predicts each target; None means row r for target r.
        temperature: Divides the logits.
        chunk_size: Rows whose fp32 temporaries may exist at a time (two for the one row in hand when the
            entropy is asked for); -1 picks a number.
        with_entropy: Also return the entropy of each target's distribution.
        reuse_logits: Let the backward write the gradient over ``logits``; only when nothing else
            reads them and the backward runs once.

    Returns:
        The scores; every rank of the group gets the same.
    """
    if rows is None:
        rows = torch.arange(len(targets), device=targets.device)
    if chunk_size <= 0:
        chunk_size = automatic_chunk(logits.device, logits.size(1))
    options = _Options(shard, 1.0 / temperature, chunk_size, with_entropy, reuse_logits)
    log_probs, entropy = _ScoreTokens.apply(logits, targets, rows, options)
    return TokenScores(log_probs=log_probs, entropy=entropy.index_select(0, rows) if with_entropy else None)


def automatic_chunk(device: torch.device, num_columns: int) -> int:
    """Rows per chunk when none is asked for."""
    budget = AUTO_CHUNK_ELEMENTS.get(device.type, AUTO_CHUNK_ELEMENTS["cuda"])
    return max(1, budget // max(num_columns, 1))


@dataclass(frozen=True, slots=True)
class _Options:
    shard: VocabShard
    inverse_temperature: float
    chunk: int
    with_entropy: bool
    reuse_logits: bool

    def accumulate_dtype(self, logits: Tensor) -> torch.dtype:
        return torch.float64 if logits.dtype == torch.float64 else torch.float32


class _ScoreTokens(torch.autograd.Function):
    """``(logits [U, V/tp], targets [R], rows [R]) -> (log-probs [R], entropy [U])``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, rows: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        shard, scale = options.shard, options.inverse_temperature
        dtype = options.accumulate_dtype(logits)
        ctx.set_materialize_grads(False)
        peak, log_sum, entropy = _row_statistics(logits, options)
        log_normaliser = log_sum + peak
        column, held = _local_columns(targets, shard)
        chosen = logits[rows, column].to(dtype) * scale
        chosen = torch.where(held, chosen, chosen.new_zeros(()))
        if shard.group is not None:
            dist.all_reduce(chosen, group=shard.group)
        ctx.options = options
        ctx.save_for_backward(logits, targets, rows, log_normaliser, entropy)
        if not options.with_entropy:
            ctx.mark_non_differentiable(entropy)
        # Peak first: a confident token's log-prob is tiny, and would drown in the rounding of large logits.
        log_probs = (chosen - peak.index_select(0, rows)) - log_sum.index_select(0, rows)
        return log_probs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, rows, log_normaliser, entropy = ctx.saved_tensors
        options: _Options = ctx.options
        shard, scale = options.shard, options.inverse_temperature
        grad_logits = logits.detach() if options.reuse_logits else torch.empty_like(logits)
        # A loss may use only one of the two.
        used = log_normaliser.new_zeros(len(targets)) if grad_log_probs is None else grad_log_probs
        grad_log_probs = used.to(log_normaliser.dtype)
        row_totals = torch.zeros_like(log_normaliser).index_add_(0, rows, grad_log_probs)
        column, held = _local_columns(targets, shard)
        chosen = _ByRow(rows, column, torch.where(held, grad_log_probs, torch.zeros_like(grad_log_probs)))
        for span, grad in softmax_gradient(
            logits[:, : shard.num_valid],
            log_normaliser,
            row_totals,
            None if grad_entropy is None else (entropy, grad_entropy),
            scale=scale,
            chunk=options.chunk,
        ):
            # The chosen entry is g (1 - p): adding g before rounding to the logits' dtype keeps the
            # digits that remain when p is close to 1.
            chosen.add_to(grad, span)
            grad_logits[span, : shard.num_valid] = grad.mul_(scale)
        grad_logits[:, shard.num_valid :] = 0
        return grad_logits, None, None, None


def _local_columns(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Column of each target in this shard (0 where it is elsewhere), and whether it is here."""
    column = targets - shard.start
    held = (column >= 0) & (column < shard.num_valid)
    return torch.where(held, column, torch.zeros_like(column)), held


class _ByRow:
    """What the chosen tokens add to the gradient, found by spans of rows without looking at all of them."""

    def __init__(self, rows: Tensor, column: Tensor, values: Tensor) -> None:
        self._rows, order = rows.sort()
        self._column, self._values = column[order], values[order]
        self._host_rows = self._rows.cpu()  # one wait for the device per backward, none per span

    def add_to(self, grad: Tensor, span: slice) -> None:
        """Add to the gradient ``[C, n]`` of some rows."""
        begin, end = torch.searchsorted(self._host_rows, torch.tensor([span.start, span.stop])).tolist()
        if begin < end and grad.numel():
            index = (self._rows[begin:end] - span.start) * grad.size(1) + self._column[begin:end]
            grad.view(-1).scatter_add_(0, index, self._values[begin:end])


def _row_statistics(logits: Tensor, options: _Options) -> tuple[Tensor, Tensor, Tensor]:
    """Over all shards, ``[U]`` each: largest logit, log of the sum of exponentials above it, entropy (or nothing)."""
    shard, scale, dtype = options.shard, options.inverse_temperature, options.accumulate_dtype(logits)
    peak = logits.new_full((len(logits),), float("-inf"), dtype=dtype)
    if shard.num_valid:
        peak = logits[:, : shard.num_valid].amax(dim=1).to(dtype) * scale
    if shard.group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
    valid = logits[:, : shard.num_valid]
    found = row_statistics(valid, peak, scale=scale, chunk=options.chunk, with_weighted=options.with_entropy)
    sums = found.total[None] if found.weighted is None else torch.stack([found.total, found.weighted])
    if shard.group is not None:
        dist.all_reduce(sums, group=shard.group)
    log_sum = sums[0].log()
    return peak, log_sum, log_sum - sums[1] / sums[0] if options.with_entropy else log_sum.new_zeros(0)


def complete_over_context(local: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """Response tokens that context-parallel ranks scored, put together on every rank.

    Collective over ``group`` in the forward only: each rank computes the same loss from the whole
    and takes the gradient of its own tokens, which Megatron then sums over the group.

    Args:
        local: ``[r]`` values of the tokens predicted on this rank.
        places: ``[r]`` int64 where they stand among all response tokens.
        total: Number of all response tokens.
        group: The context-parallel group.

    Returns:
        ``[total]``.
    """
    return _CompleteOverContext.apply(local, places, total, group)  # type: ignore[no-any-return]


class _CompleteOverContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(places)
        whole = local.new_zeros(total).index_copy_(0, places, local)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None, None
