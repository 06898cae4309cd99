"""``--save-debug-train-data``: what a rollout was trained on, one file per rollout.

The file is ``torch.save`` of a dictionary: ``format_version`` 2, ``rollout_id``, ``rank`` (who wrote it), ``samples``
(one dictionary per trained sample, in the order of the rollout), ``dp_shards`` (who trained what) and ``raw_reward``.
Owns the layout and the gathering; the columns are ``rollout_columns``', under the names that plug-ins know. Tests
hold: every trained sample is there once, whatever the layout, and the columns are those of the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.rollout_columns import Column, RolloutColumns, to_hook_data
from slime.backends.megatron.rollout_plan import RolloutPlan
from slime.data.record import dump_path
from slime.files import write_atomically
from slime.types import RolloutBatch

FORMAT_VERSION = 2

_SAMPLE_NAMES = {"sample_indices": "sample_index"}


def save_train_dump(
    template: str,
    batch: RolloutBatch,
    plan: RolloutPlan,
    columns: RolloutColumns,
    current: Column,
    parallel: ParallelState,
) -> None:
    """Write the dump of one rollout. Collective over the data-parallel group of the last pipeline stage.

    Args:
        template: The path, with ``{rollout_id}``.
        batch: The rollout.
        plan: This rank's share and everyone's schedule.
        columns: What the loss saw of this rank's samples.
        current: Log-probs of each sample when its step began; empty if no step was completed.
        parallel: This rank's place.
    """
    if not parallel.is_pp_last or parallel.tp_rank or parallel.cp_rank:
        return
    share: dict[str, Any] = {
        "shard": _shard(plan, parallel),
        "samples": _samples(batch, plan, columns, current),
    }
    shares: list[Any] = [share]
    if parallel.dp_size > 1:
        shares = [None] * parallel.dp_size if parallel.dp_rank == 0 else []
        first = dist.get_process_group_ranks(parallel.dp_group)[0]
        dist.gather_object(share, shares or None, dst=first, group=parallel.dp_group)
    if parallel.dp_rank:
        return
    samples = sorted((row for part in shares for row in part["samples"]), key=lambda row: row["rollout_position"])
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": batch.rollout_id,
        "rank": parallel.rank,
        "samples": samples,
        "dp_shards": [part["shard"] for part in shares],
        "raw_reward": list(batch.raw_rewards),
    }
    write_atomically(dump_path(template, batch.rollout_id), lambda aside: torch.save(content, aside))


def _samples(batch: RolloutBatch, plan: RolloutPlan, columns: RolloutColumns, current: Column) -> list[dict[str, Any]]:
    """This rank's samples, each with every column it has."""
    data = to_hook_data(batch, columns, plan.samples)
    del data["unconcat_tokens"]  # the same tokens again
    if current:
        data["current_log_probs"] = [current[i] for i in plan.samples]
    rows: list[dict[str, Any]] = []
    for place, i in enumerate(plan.samples):
        row = {_SAMPLE_NAMES.get(name, name): _on_cpu(values[place]) for name, values in data.items()}
        rows.append({"rollout_position": i} | row)
    return rows


def _shard(plan: RolloutPlan, parallel: ParallelState) -> dict[str, Any]:
    """Who this is, and what it trained: positions in its ``partition``, per step and micro-batch."""
    steps = plan.schedule.steps
    return {
        "rank": parallel.rank,
        "dp_rank": parallel.dp_rank,
        "partition": list(plan.samples),
        "micro_batch_indices": plan.schedule.rank_micro_batches(parallel.dp_rank),
        "num_microbatches": [step.num_micro_batches for step in steps],
        "global_batch_sizes": [step.num_rollouts for step in steps],
    }


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
