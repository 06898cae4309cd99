"""The dict form of a batch that hooks read and write, next to the typed one.

Tests hold: a batch survives the way to columns and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from slime.errors import PluginError
from slime.replay_data import no_kept_tokens, no_routes
from slime.types import Float32Array, Int32Array, RolloutBatch
from slime.version_spans import VersionSpan

_FLAG = "--custom-convert-samples-to-train-data-path"
_REQUIRED = ("tokens", "response_lengths", "rewards")
_TYPED = frozenset(
    {
        *_REQUIRED,
        "raw_reward",
        "truncated",
        "sample_indices",
        "group_ids",
        "rollout_ids",
        "loss_masks",
        "rollout_mask_sums",
        "weight_versions",
        "weight_version_spans",
        "rollout_log_probs",
        "teacher_log_probs",
        "values",
        "returns",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "rollout_routed_experts",
        "metadata",
    }
)


def fill_missing_ids(ids: Sequence[int | None]) -> list[int]:
    """Ids with every None replaced by an unused number."""
    unused = max((i for i in ids if i is not None), default=-1) + 1
    filled: list[int] = []
    for i in ids:
        filled.append(unused if i is None else i)
        unused += i is None
    return filled


def rollout_mask_sums(loss_masks: Sequence[Float32Array], rollout_ids: Sequence[int]) -> list[float]:
    """For each sample, the number of trained tokens over all samples with its rollout id."""
    sums: dict[int, float] = {}
    for mask, rollout_id in zip(loss_masks, rollout_ids, strict=True):
        sums[rollout_id] = sums.get(rollout_id, 0.0) + float(mask.sum())
    return [sums[rollout_id] for rollout_id in rollout_ids]


def with_rows(batch: RolloutBatch, **columns: Mapping[int, Float32Array]) -> RolloutBatch:
    """The batch with response-aligned columns that were found sample by sample.

    Args:
        batch: N samples.
        **columns: ``values`` or ``returns``: sample -> ``[R_i]``. A sample without a row, because no optimizer
            step takes it, gets NaN: whoever reads it by mistake will notice.
    """
    rows: dict[str, Any] = {
        name: [
            found[i] if i in found else np.full(length, np.nan, dtype=np.float32)
            for i, length in enumerate(batch.response_lengths)
        ]
        for name, found in columns.items()
    }
    return replace(batch, **rows)


def kept_token_columns(
    ids: Sequence[Any] | None, offsets: Sequence[Any] | None, response_lengths: Sequence[int]
) -> tuple[list[Int32Array] | None, list[Int32Array] | None]:
    """Columns of kept token sets; a sample without them gets empty ones, and none at all make no column.

    Args:
        ids: N times ``[K_i]``, any of them None.
        offsets: N times ``[R_i + 1]``, None where ``ids`` is.
        response_lengths: N.

    Raises:
        ValueError: One comes without the other.
    """
    if ids is None and offsets is None:
        return None, None
    id_rows: list[Int32Array] = []
    offset_rows: list[Int32Array] = []
    missing = 0
    for row, starts, length in zip(ids or (), offsets or (), response_lengths, strict=True):
        if (row is None) != (starts is None):
            raise ValueError("rollout_top_p_token_ids and rollout_top_p_token_offsets come together or not at all")
        missing += row is None
        pair = no_kept_tokens(length) if row is None else (row, starts)
        id_rows.append(np.asarray(pair[0], dtype=np.int32))
        offset_rows.append(np.asarray(pair[1], dtype=np.int32))
    return (None, None) if missing == len(response_lengths) else (id_rows, offset_rows)


def route_column(rows: Sequence[Any] | None, total_lengths: Sequence[int]) -> list[Int32Array] | None:
    """The column of routed experts ``[L_i - 1, layers, top-k]``; a sample without any gets rows of ``UNROUTED``."""
    example = next((row for row in rows or () if row is not None), None)
    if rows is None or example is None:
        return None
    inner = np.asarray(example).shape[1:]
    return [
        no_routes(length - 1, inner) if row is None else np.asarray(row, dtype=np.int32)
        for row, length in zip(rows, total_lengths, strict=True)
    ]


def batch_to_columns(batch: RolloutBatch) -> dict[str, Any]:
    """The batch as the dict of lists that hooks know; the lists are the batch's own."""
    columns: dict[str, Any] = {
        "tokens": batch.tokens,
        "response_lengths": batch.response_lengths,
        "rewards": batch.rewards,
        "raw_reward": batch.raw_rewards,
        "truncated": [int(t) for t in batch.truncated],
        "sample_indices": batch.sample_indices,
        "group_ids": batch.group_ids,
        "rollout_ids": batch.rollout_ids,
        "loss_masks": batch.loss_masks,
        "rollout_mask_sums": batch.rollout_mask_sums,
        "weight_versions": batch.weight_versions,
    }
    optional = {
        "weight_version_spans": batch.weight_version_spans,
        "rollout_log_probs": batch.rollout_log_probs,
        "teacher_log_probs": batch.teacher_log_probs,
        "values": batch.values,
        "returns": batch.returns,
        "rollout_top_p_token_ids": batch.rollout_top_p_token_ids,
        "rollout_top_p_token_offsets": batch.rollout_top_p_token_offsets,
        "rollout_routed_experts": batch.rollout_routed_experts,
        "metadata": batch.metadata,
    }
    columns.update({name: column for name, column in optional.items() if column is not None})
    return {**columns, **batch.extra}


def batch_from_columns(rollout_id: int, columns: Mapping[str, Any], group_ids: Sequence[int]) -> RolloutBatch:
    """A batch from the dict of a conversion hook; what can be derived may be left out.

    Args:
        rollout_id: Number of the rollout.
        columns: Lists with one entry per sample; unknown names become extra columns.
        group_ids: Ids of the samples the hook was given, used if it kept their number.

    Raises:
        PluginError: A required column is missing, or columns do not fit each other.
    """
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise PluginError(f"{_FLAG}: columns {', '.join(missing)} are missing; found {', '.join(sorted(columns))}")
    lengths = [int(n) for n in columns["response_lengths"]]
    n = len(lengths)
    masks = columns.get("loss_masks") or [None] * n
    try:
        loss_masks = [
            np.ones(length, dtype=np.float32) if mask is None else np.asarray(mask, dtype=np.float32)
            for mask, length in zip(masks, lengths, strict=True)
        ]
        rollout_ids = fill_missing_ids(list(columns.get("rollout_ids") or [None] * n))
        own_groups = columns.get("group_ids") or (group_ids if len(group_ids) == n else range(n))
        rewards = [float(r) for r in columns["rewards"]]
        tokens = [np.asarray(row, dtype=np.int32) for row in columns["tokens"]]
        kept_ids, kept_offsets = kept_token_columns(
            columns.get("rollout_top_p_token_ids"), columns.get("rollout_top_p_token_offsets"), lengths
        )
        return RolloutBatch(
            rollout_id=rollout_id,
            tokens=tokens,
            response_lengths=lengths,
            loss_masks=loss_masks,
            rewards=rewards,
            raw_rewards=[float(r) for r in columns.get("raw_reward") or rewards],
            truncated=[bool(t) for t in columns.get("truncated") or [False] * n],
            sample_indices=fill_missing_ids(list(columns.get("sample_indices") or [None] * n)),
            group_ids=[int(g) for g in own_groups],
            rollout_ids=rollout_ids,
            rollout_mask_sums=[float(s) for s in columns.get("rollout_mask_sums") or ()]
            or rollout_mask_sums(loss_masks, rollout_ids),
            weight_versions=[tuple(v) for v in columns.get("weight_versions") or [()] * n],
            weight_version_spans=_span_rows(columns.get("weight_version_spans")),
            rollout_log_probs=_float_rows(columns.get("rollout_log_probs")),
            teacher_log_probs=_float_rows(columns.get("teacher_log_probs")),
            values=_float_rows(columns.get("values")),
            returns=_float_rows(columns.get("returns")),
            rollout_top_p_token_ids=kept_ids,
            rollout_top_p_token_offsets=kept_offsets,
            rollout_routed_experts=route_column(columns.get("rollout_routed_experts"), [len(t) for t in tokens]),
            metadata=list(columns["metadata"]) if columns.get("metadata") else None,
            extra={name: list(column) for name, column in columns.items() if name not in _TYPED},
        )
    except (TypeError, ValueError) as error:
        raise PluginError(f"{_FLAG}: the returned columns do not make a batch: {error}") from error


def _span_rows(rows: Any) -> list[tuple[VersionSpan, ...]] | None:
    if rows is None:
        return None
    return [
        tuple(span if isinstance(span, VersionSpan) else VersionSpan(**span) for span in row)
        for row in cast(Sequence[Sequence[Any]], rows)
    ]


def _float_rows(rows: Any) -> list[Float32Array] | None:
    if rows is None:
        return None
    return [np.asarray(row, dtype=np.float32) for row in cast(Sequence[Any], rows)]
