"""Per-sample columns of one rank: what scoring found, what the loss needs, what hooks see and change.

A column maps a sample's index in the ``RolloutBatch`` to a ``[R_i]`` tensor; only this rank's samples
are in it. Owns their assembly from the batch, and the dictionary form that plug-ins read and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron.parallel import ParallelState
from slime.errors import PluginError
from slime.types import Float32Array, RolloutBatch

Column = dict[int, Tensor]


@dataclass(kw_only=True)
class RolloutColumns:
    """Columns of this rank's samples; None where a pass was not run or the batch has no such data.

    Filled in stages (scores, then advantages), hence not frozen. ``old_log_probs`` stays None when the
    first optimizer step may take the current log-probs for them.
    """

    masks: Column
    rollout_log_probs: Column | None = None
    teacher_log_probs: Column | None = None
    old_log_probs: Column | None = None
    ref_log_probs: Column | None = None
    entropy: Column | None = None
    kl: Column | None = None
    values: Column | None = None
    opd_reverse_kl: Column | None = None
    advantages: Column | None = None
    returns: Column | None = None

    @classmethod
    def of(cls, batch: RolloutBatch, samples: Sequence[int], device: torch.device) -> RolloutColumns:
        """The columns that come with the batch, on the device."""

        def column(rows: Sequence[Any] | None) -> Column | None:
            if rows is None:
                return None
            return {i: torch.as_tensor(rows[i], dtype=torch.float32, device=device) for i in samples}

        masks = column(batch.loss_masks)
        assert masks is not None
        return cls(
            masks=masks,
            rollout_log_probs=column(batch.rollout_log_probs),
            teacher_log_probs=column(batch.teacher_log_probs),
            values=column(batch.values),
            returns=column(batch.returns),
        )


def to_rows(column: Column, parallel: ParallelState) -> dict[int, Float32Array]:
    """A column for the other role: each sample from one rank only, the first of those that hold it.

    Empty on all but the last pipeline stage's first tensor- and context-parallel rank.
    """
    if not parallel.is_pp_last or parallel.tp_rank or parallel.cp_rank:
        return {}
    return {i: value.detach().float().cpu().numpy() for i, value in column.items()}


# Established names of the columns in the dictionary that hooks get.
_HOOK_NAMES = {"old_log_probs": "log_probs", "masks": "loss_masks"}


def hook_name(column: str) -> str:
    """The key under which plug-ins know a column."""
    return _HOOK_NAMES.get(column, column)


def to_hook_data(batch: RolloutBatch, columns: RolloutColumns, samples: Sequence[int]) -> dict[str, Any]:
    """This rank's samples as the dictionary of lists that plug-ins expect.

    Args:
        batch: The rollout.
        columns: This rank's columns.
        samples: Which samples, in the order of every list.
    """
    device = next(iter(columns.masks.values())).device if columns.masks else torch.device("cpu")
    data: dict[str, Any] = {
        "tokens": [torch.as_tensor(batch.tokens[i], dtype=torch.int64, device=device) for i in samples],
        "total_lengths": [len(batch.tokens[i]) for i in samples],
        "raw_reward": [batch.raw_rewards[i] for i in samples],
    }
    data["unconcat_tokens"] = data["tokens"]
    names = ("response_lengths", "rewards", "truncated", "sample_indices", "group_ids", "rollout_ids")
    replayed = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")
    for name in (*names, "rollout_mask_sums", "weight_versions", "weight_version_spans", "metadata", *replayed):
        rows = getattr(batch, name)
        if rows is not None:
            data[name] = [rows[i] for i in samples]
    for name, rows in batch.extra.items():
        data[name] = [rows[i] for i in samples]
    for field in fields(columns):
        column: Column | None = getattr(columns, field.name)
        if column is not None:
            data[hook_name(field.name)] = [column[i] for i in samples]
    return data


def from_hook_data(
    data: dict[str, Any], batch: RolloutBatch, columns: RolloutColumns, samples: Sequence[int], *, flag: str
) -> None:
    """Take over the columns that a hook set or changed.

    Raises:
        PluginError: A column no longer has one value per response token.
    """
    for field in fields(columns):
        rows = data.get(hook_name(field.name))
        if rows is None:
            continue
        if len(rows) != len(samples):
            raise PluginError(f"{flag} left {len(rows)} entries in {hook_name(field.name)!r}, expected {len(samples)}")
        column: Column = {}
        for i, row in zip(samples, rows, strict=True):
            value = torch.as_tensor(row, dtype=torch.float32, device=columns.masks[i].device)
            if value.shape != (batch.response_lengths[i],):
                raise PluginError(
                    f"{flag} left {hook_name(field.name)!r} of sample {batch.sample_indices[i]} with shape "
                    f"{tuple(value.shape)}; the response has {batch.response_lengths[i]} tokens"
                )
            column[i] = value
        setattr(columns, field.name, column)
