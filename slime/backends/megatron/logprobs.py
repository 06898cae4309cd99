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

from slime.backends.megatron.kept_tokens import KeptTokens, RestrictedSoftmax
from slime.backends.megatron.vocab_chunks import row_statistics, softmax_gradient
from slime.backends.megatron.vocab_kernels import VocabKernels, chosen_gradient
from slime.backends.megatron.vocab_shard import VocabShard

# Rows per chunk when none is asked for: temporaries stay in the cache of a CPU core, and on a GPU are
# large enough to keep it busy.
AUTO_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}


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
    kept: KeptTokens | None = None,
    kernels: VocabKernels | None = None,
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
        kept: R sets of token ids to which the log-probs, not the entropy, are restricted.
        kernels: Go over the logits by these instead of by chunks. They serve what is not ``kept``.

    Returns:
        The scores; every rank of the group gets the same.
    """
    if rows is None:
        rows = torch.arange(len(targets), device=targets.device)
    if chunk_size <= 0:
        chunk_size = automatic_chunk(logits.device, logits.size(1))
    scale = 1.0 / temperature
    restricted = None
    if kept is not None:
        # An entry takes several indices, so fewer of them than elements of a chunk are in hand at once.
        entries = max(1, chunk_size * logits.size(1) // 16)
        restricted = RestrictedSoftmax(kept, rows, shard, scale=scale, entries_per_piece=entries)
    options = _Options(shard, scale, chunk_size, with_entropy, reuse_logits, restricted, kernels)
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
    restricted: RestrictedSoftmax | None
    kernels: VocabKernels | None

    @property
    def uses_whole_rows(self) -> bool:
        """Whether anything is asked that depends on logits outside the kept sets."""
        return self.with_entropy or self.restricted is None or not self.restricted.restricts_all

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
        column, held = shard.columns(targets)
        chosen = logits[rows, column].to(dtype) * scale
        chosen = torch.where(held, chosen, chosen.new_zeros(()))
        if shard.group is not None:
            dist.all_reduce(chosen, group=shard.group)
        peak, log_sum = peak.index_select(0, rows), log_sum.index_select(0, rows)
        restricted_normaliser = log_normaliser.new_zeros(0)
        if options.restricted is not None:
            kept_peak, kept_log_sum = options.restricted.log_sums(logits, dtype)
            restricted_normaliser = kept_peak + kept_log_sum
            peak = torch.where(options.restricted.restricted, kept_peak, peak)
            log_sum = torch.where(options.restricted.restricted, kept_log_sum, log_sum)
        ctx.options = options
        ctx.save_for_backward(logits, targets, rows, log_normaliser, entropy, restricted_normaliser)
        if not options.with_entropy:
            ctx.mark_non_differentiable(entropy)
        # Peak first: a confident token's log-prob is tiny, and would drown in the rounding of large logits.
        return (chosen - peak) - log_sum, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, rows, log_normaliser, entropy, restricted_normaliser = ctx.saved_tensors
        options: _Options = ctx.options
        shard, scale, restricted = options.shard, options.inverse_temperature, options.restricted
        # A loss may use only one of the two.
        used = log_normaliser.new_zeros(len(targets)) if grad_log_probs is None else grad_log_probs
        grad_log_probs = used.to(log_normaliser.dtype)
        whole = grad_log_probs if restricted is None else grad_log_probs.masked_fill(restricted.restricted, 0)
        row_totals = torch.zeros_like(log_normaliser).index_add_(0, rows, whole)
        column, held = shard.columns(targets)
        places, values = (rows, column), torch.where(held, grad_log_probs, torch.zeros_like(grad_log_probs))
        of_entropy = None if grad_entropy is None else (entropy, grad_entropy)
        if options.kernels is not None and restricted is None:
            return _gradient_by_kernels(options, logits, places, values, log_normaliser, row_totals, of_entropy), *NONES
        chosen = _ByRow(*places, values)
        grad_logits = logits.detach() if options.reuse_logits else torch.empty_like(logits)
        valid = logits[:, : shard.num_valid]
        for span, grad in softmax_gradient(
            valid, log_normaliser, row_totals, of_entropy, scale=scale, chunk=options.chunk
        ):
            if restricted is not None:
                restricted.subtract_expectation(grad, valid[span], span.start, grad_log_probs, restricted_normaliser)
            # The chosen entry is g (1 - p): adding g before rounding to the logits' dtype keeps the
            # digits that remain when p is close to 1.
            chosen.add_to(grad, span)
            grad_logits[span, : shard.num_valid] = grad.mul_(scale)
        grad_logits[:, shard.num_valid :] = 0
        return grad_logits, *NONES


NONES = (None, None, None)
"""Gradients of everything but the logits."""


def _gradient_by_kernels(
    options: _Options,
    logits: Tensor,
    places: tuple[Tensor, Tensor],
    values: Tensor,
    log_normaliser: Tensor,
    row_totals: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The gradient of the logits; the chosen ones are computed apart, before they are rounded."""
    assert options.kernels is not None
    scale, num_valid = options.inverse_temperature, options.shard.num_valid
    grad_logits = logits.detach() if options.reuse_logits else logits.detach().clone()
    if num_valid:
        chosen = logits.detach()[places].to(log_normaliser.dtype) * scale
        at_chosen = chosen_gradient(chosen, places, values, log_normaliser, row_totals, entropy)
        valid = grad_logits[:, :num_valid]
        options.kernels.gradient_in_place(valid, log_normaliser, row_totals, entropy, scale=scale)
        valid[places] = (at_chosen * scale).to(valid.dtype)
    grad_logits[:, num_valid:] = 0
    return grad_logits


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
    if not options.uses_whole_rows:
        # An infinite normaliser: whole rows have no part in the result, and none in the gradient.
        peak = logits.new_full((len(logits),), float("inf"), dtype=dtype)
        return peak, torch.zeros_like(peak), peak.new_zeros(0)
    peak = logits.new_full((len(logits),), float("-inf"), dtype=dtype)
    if shard.num_valid:
        peak = logits[:, : shard.num_valid].amax(dim=1).to(dtype) * scale
    if shard.group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
    valid, with_weighted = logits[:, : shard.num_valid], options.with_entropy
    if options.kernels is not None:
        found = options.kernels.row_statistics(valid, peak, scale=scale, with_weighted=with_weighted)
    else:
        found = row_statistics(valid, peak, scale=scale, chunk=options.chunk, with_weighted=with_weighted)
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
