"""Metrics of one optimizer step from the sums of its micro-batches.

Owns the exact reduction over micro-batches and ranks: sums are added and divided once, extremes
and histograms are combined, quantiles are taken of the combined histogram. Tests hold: metrics do
not depend on the split of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from slime.algorithms.monitors import quantile_of
from slime.algorithms.objective import Objective
from slime.backends.megatron.parallel import ParallelState

QUANTILES = {"p99": 0.99}

_NEUTRAL = {dist.ReduceOp.SUM: 0.0, dist.ReduceOp.MAX: -math.inf, dist.ReduceOp.MIN: math.inf}


def reduce_objectives(
    objectives: Sequence[Objective],
    denominator: int,
    parallel: ParallelState,
    *,
    names_may_differ: bool = False,
) -> dict[str, float]:
    """Metrics of one step, on every rank.

    Collective over the data-parallel group of the last pipeline stage, then over the pipeline group;
    tensor- and context-parallel ranks hold equal values already.

    Args:
        objectives: This rank's micro-batches; empty on all but the last stage.
        denominator: What sums are divided by.
        parallel: This rank's place.
        names_may_differ: Let the ranks agree on the names first: a user's function may give a metric on
            some of them only, and a rank of placeholders knows none.
    """
    metrics: dict[str, float] = {}
    if parallel.is_pp_last:
        sums = _combine([o.sums for o in objectives], dist.ReduceOp.SUM, parallel, names_may_differ=names_may_differ)
        metrics = {name: value / denominator for name, value in sums.items()}
        maxima = _combine([o.maxima for o in objectives], dist.ReduceOp.MAX, parallel)
        minima = _combine([o.minima for o in objectives], dist.ReduceOp.MIN, parallel)
        # A neutral element is left where no token counted; there is nothing to report then.
        metrics |= {name: value for name, value in maxima.items() if value != -math.inf}
        metrics |= {name: value for name, value in minima.items() if value != math.inf}
        metrics |= _quantiles([o.histograms for o in objectives], parallel)
    if parallel.pp_size > 1:
        holder: list[Any] = [metrics]
        source = dist.get_process_group_ranks(parallel.pp_group)[-1]
        dist.broadcast_object_list(holder, src=source, group=parallel.pp_group)
        metrics = holder[0]
    return metrics


def _combine(
    rows: Sequence[Mapping[str, Tensor]],
    operation: dist.ReduceOp.RedOpType,
    parallel: ParallelState,
    *,
    names_may_differ: bool = False,
) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    if names_may_differ and parallel.dp_size > 1:
        everyone: list[Any] = [None] * parallel.dp_size
        dist.all_gather_object(everyone, names, group=parallel.dp_group)
        names = sorted({name for part in everyone for name in part})
    if not names:
        return {}
    neutral = torch.full((), _NEUTRAL[operation], dtype=torch.float64, device=parallel.device)
    table = torch.stack([torch.stack([row.get(n, neutral).double() for n in names]) for row in rows])
    if operation == dist.ReduceOp.SUM:
        values = table.sum(0)
    else:
        values = table.amax(0) if operation == dist.ReduceOp.MAX else table.amin(0)
    if parallel.dp_size > 1:
        dist.all_reduce(values, op=operation, group=parallel.dp_group)
    return dict(zip(names, values.tolist(), strict=True))


def _quantiles(rows: Sequence[Mapping[str, Tensor]], parallel: ParallelState) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    if not names:
        return {}
    counts = torch.stack([sum(row[n] for row in rows if n in row) for n in names])  # type: ignore[arg-type]
    if parallel.dp_size > 1:
        dist.all_reduce(counts, group=parallel.dp_group)
    found = {
        f"{name}_{label}": quantile_of(row, q)
        for name, row in zip(names, counts.tolist(), strict=True)
        for label, q in QUANTILES.items()
    }
    return {name: value for name, value in found.items() if value is not None}
