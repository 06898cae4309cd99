"""The pattern of trainer / engine differences over all ranks, as metrics of a rollout.

Owns the reduction; the arithmetic is ``algorithms.logprob_pattern``'s. Computed only when somebody asks, because
a rollout within ``--max-logprob-diff`` needs no explanation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed as dist

from slime.algorithms.logprob_pattern import NUM_SUMS, pattern_sums, read_pattern
from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.rollout_columns import Column
from slime.observability.logprob_monitor import PATTERN_PREFIX


def difference_pattern(
    scored: Column,
    engine: Column,
    entropy: Column,
    masks: Column,
    samples: Sequence[int],
    parallel: ParallelState,
) -> dict[str, float]:
    """Metrics of the pattern. Collective over the data-parallel group, then over the pipeline group.

    Args:
        scored: Trainer log-probs of this rank's samples, on the last stage.
        engine: The engine's.
        entropy: Entropies under the weights of ``scored``; empty leaves the temperature out.
        masks: Loss masks.
        samples: This rank's samples.
        parallel: This rank's place.
    """
    metrics: dict[str, float] = {}
    if parallel.is_pp_last:
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=parallel.device)
        largest = torch.zeros((), dtype=torch.float64, device=parallel.device)
        for i in samples:
            row, top = pattern_sums(scored[i], engine[i], entropy.get(i), masks[i], [len(masks[i])])
            sums, largest = sums + row, torch.maximum(largest, top)
        if parallel.dp_size > 1:
            dist.all_reduce(sums, group=parallel.dp_group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel.dp_group)
        pattern = read_pattern(sums.tolist(), float(largest))
        metrics = {f"{PATTERN_PREFIX}{name}": value for name, value in asdict(pattern).items()}
    if parallel.pp_size > 1:
        holder: list[Any] = [metrics]
        dist.broadcast_object_list(
            holder, src=dist.get_process_group_ranks(parallel.pp_group)[-1], group=parallel.pp_group
        )
        metrics = holder[0]
    return metrics
