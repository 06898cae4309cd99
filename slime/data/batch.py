"""Finished groups to the batch that training takes.

Owns flattening, ids, loss masks, the rewards' group baseline and the two hooks that may replace it.
Tests hold: the order of samples never changes a value; the baseline is taken by group id whatever the
sizes; a sample taken out of training still counts in its group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, cast

import numpy as np

from slime.algorithms import ALGORITHMS, overlong_penalty, shape_group_rewards
from slime.data.columns import (
    batch_from_columns,
    fill_missing_ids,
    kept_token_columns,
    rollout_mask_sums,
    route_column,
)
from slime.data.dataset import get_source
from slime.errors import PluginError
from slime.plugins import load_plugin
from slime.types import Float32Array, RolloutBatch, Sample, SampleArgs, Status
from slime.version_spans import VersionSpan, clip_spans

logger = logging.getLogger(__name__)

NestedSamples = Sequence[Any]
"""Groups: lists of samples, any of which may itself be a list of samples (fan-out)."""


class BatchArgs(SampleArgs, Protocol):
    """What batching reads from ``args``."""

    advantage_estimator: str
    rewards_normalization: bool
    grpo_std_normalization: bool
    overlong_buffer_len: int | None
    overlong_penalty_factor: float
    rollout_max_response_len: int | None
    custom_reward_post_process_path: str | None
    custom_convert_samples_to_train_data_path: str | None


def build_rollout_batch(args: BatchArgs, rollout_id: int, groups: NestedSamples) -> RolloutBatch:
    """Turn the groups of one rollout into columns.

    Args:
        args: Flat argument view; the hooks receive it.
        rollout_id: Number of the rollout.
        groups: One entry per prompt: a list of samples or of fan-out lists. A flat list of
            samples is accepted as well.

    Returns:
        One entry per sample, in the order of ``groups``.

    Raises:
        ValueError: A sample is not ready to be trained on; the message names it.
        PluginError: A hook answered with something else than it should.
    """
    samples, group_ids = flatten_groups(groups)
    if not samples:
        raise ValueError(f"rollout {rollout_id} has no samples to train on; every group was dropped or is empty")
    if args.custom_convert_samples_to_train_data_path is not None:
        return _converted(args, args.custom_convert_samples_to_train_data_path, rollout_id, samples, group_ids)
    for sample in samples:
        _check_ready(sample)
    rollout_ids = fill_missing_ids([sample.rollout_id for sample in samples])
    penalties = overlong_penalties(args, samples)
    raw_rewards, rewards = _rewards(args, samples, group_ids, rollout_ids, penalties)
    loss_masks = [_loss_mask(sample) for sample in samples]
    kept_ids, kept_offsets = kept_token_columns(
        [sample.rollout_top_p_token_ids for sample in samples],
        [sample.rollout_top_p_token_offsets for sample in samples],
        [sample.response_length for sample in samples],
    )
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=[np.asarray(sample.tokens, dtype=np.int32) for sample in samples],
        response_lengths=[sample.response_length for sample in samples],
        loss_masks=loss_masks,
        rewards=rewards,
        raw_rewards=[float(s.metadata.get("raw_reward", raw)) for s, raw in zip(samples, raw_rewards, strict=True)],
        truncated=[sample.status == Status.TRUNCATED for sample in samples],
        sample_indices=fill_missing_ids([sample.index for sample in samples]),
        group_ids=group_ids,
        rollout_ids=rollout_ids,
        rollout_mask_sums=rollout_mask_sums(loss_masks, rollout_ids),
        weight_versions=[tuple(sample.weight_versions) for sample in samples],
        weight_version_spans=_span_column(samples),
        rollout_log_probs=_aligned_column("rollout_log_probs", samples),
        teacher_log_probs=_aligned_column("teacher_log_probs", samples),
        rollout_top_p_token_ids=kept_ids,
        rollout_top_p_token_offsets=kept_offsets,
        rollout_routed_experts=route_column(
            [sample.rollout_routed_experts for sample in samples], [len(sample.tokens) for sample in samples]
        ),
        metadata=_metadata_column(samples),
        extra=_extra_columns(samples) | ({} if penalties is None else {"overlong_penalty": penalties}),
    )


def _converted(
    args: BatchArgs, path: str, rollout_id: int, samples: list[Sample], group_ids: list[int]
) -> RolloutBatch:
    """The columns that the user's own conversion makes of the samples."""
    convert = load_plugin(path, flag="--custom-convert-samples-to-train-data-path")
    columns = convert(args, samples)
    if not isinstance(columns, Mapping):
        raise PluginError(
            f"--custom-convert-samples-to-train-data-path {path}: must return a dict of columns, "
            f"found {type(columns).__name__}"
        )
    return batch_from_columns(rollout_id, cast(Mapping[str, Any], columns), group_ids)


def flatten_groups(groups: NestedSamples) -> tuple[list[Sample], list[int]]:
    """Samples in order with the id of the prompt group each belongs to.

    A sample's ``group_index`` is its group id; without one, everything in the same entry of
    ``groups`` shares an unused number.

    Raises:
        ValueError: A fan-out list holds a sample without ``rollout_id``.
    """
    samples: list[Sample] = []
    given: list[int | None] = []
    entry: list[int] = []
    for position, group in enumerate(groups):
        for sample, depth in _walk(group, 0):
            if depth >= 2 and sample.rollout_id is None:
                raise ValueError(
                    f"sample {sample.index} of group {sample.group_index} is one of several that a single rollout "
                    "fanned out to, and has no rollout_id; give all samples of that list the same rollout_id"
                )
            samples.append(sample)
            given.append(sample.group_index)
            entry.append(position)
    unused = max((g for g in given if g is not None), default=-1) + 1
    return samples, [g if g is not None else unused + p for g, p in zip(given, entry, strict=True)]


def _walk(item: Any, depth: int) -> Iterator[tuple[Sample, int]]:
    if isinstance(item, Sample):
        yield item, depth
        return
    if not isinstance(item, list | tuple):
        raise ValueError(f"groups are lists of samples, found {type(item).__name__} in one")
    for inner in cast(Iterable[Any], item):
        yield from _walk(inner, depth + 1)


def _check_ready(sample: Sample) -> None:
    """Raise ValueError unless a sample has the tokens and columns that training needs."""
    what = f"sample {sample.index} of group {sample.group_index} ({sample.status.value})"
    if len(sample.tokens) < sample.response_length + 1:
        raise ValueError(
            f"{what} has {len(sample.tokens)} tokens and a response of {sample.response_length}; tokens must hold "
            "at least one prompt token and the whole response (set sample.tokens in the generate function)"
        )
    try:
        sample.check_alignment()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _rewards(
    args: BatchArgs,
    samples: list[Sample],
    group_ids: list[int],
    rollout_ids: list[int],
    penalties: Sequence[float] | None,
) -> tuple[list[float], list[float]]:
    """Rewards as graded and as trained on."""
    path = args.custom_reward_post_process_path
    if path is not None:
        return _custom_rewards(args, samples, path)
    raw = [_reward_value(args, sample) for sample in samples]
    # What a fault of a plug-in left behind says nothing about the prompt, so it moves no baseline.
    graded = [i for i, sample in enumerate(samples) if sample.status is not Status.FAILED]
    scored = raw if penalties is None else [r + p for r, p in zip(raw, penalties, strict=True)]
    return raw, baseline_rewards(args, scored, group_ids, rollout_ids, graded)


def baseline_rewards(
    args: BatchArgs, raw: Sequence[float], group_ids: Sequence[int], rollout_ids: Sequence[int], graded: Sequence[int]
) -> list[float]:
    """Rewards as the estimator trains on them: compared within their group where it does that.

    Args:
        args: Flat argument view.
        raw: N rewards as graded, and shortened by what depends on the sample alone.
        group_ids: N prompt ids.
        rollout_ids: N trajectory ids.
        graded: Positions of those that count; where there is a baseline, the others get 0 and move none.
    """
    spec = ALGORITHMS[args.advantage_estimator]
    if not (spec.group_baseline and args.rewards_normalization):
        return list(raw)
    shaped = shape_group_rewards(
        [raw[i] for i in graded],
        [group_ids[i] for i in graded],
        [rollout_ids[i] for i in graded],
        normalize_std=spec.group_std and args.grpo_std_normalization,
        leave_one_out=spec.leave_one_out,
    )
    rewards = [0.0] * len(raw)
    for i, reward in zip(graded, shaped, strict=True):
        rewards[i] = reward
    return rewards


def overlong_penalties(args: BatchArgs, samples: Sequence[Sample]) -> list[float] | None:
    """What the rewards of N samples lose by their length; None without ``--overlong-buffer-len``.

    A failed sample loses nothing; the samples of a fanned-out rollout are measured one by one.
    """
    longest = args.rollout_max_response_len
    if args.overlong_buffer_len is None or longest is None or args.custom_reward_post_process_path is not None:
        return None
    buffer, factor = args.overlong_buffer_len, args.overlong_penalty_factor
    return [
        0.0 if sample.status is Status.FAILED else overlong_penalty(sample.response_length, longest, buffer, factor)
        for sample in samples
    ]


def _custom_rewards(args: BatchArgs, samples: list[Sample], path: str) -> tuple[list[float], list[float]]:
    flag = "--custom-reward-post-process-path"
    hook: Callable[..., Any] = load_plugin(path, flag=flag)
    answer = hook(args, samples)
    if not isinstance(answer, tuple) or len(cast(tuple[Any, ...], answer)) != 2:
        raise PluginError(f"{flag} {path}: must return (raw_rewards, rewards), found {cast(Any, answer)!r:.80}")
    raw, rewards = ([float(value) for value in column] for column in cast(tuple[Any, Any], answer))
    if len(raw) != len(samples) or len(rewards) != len(samples):
        raise PluginError(
            f"{flag} {path}: got {len(samples)} samples and returned {len(raw)} raw rewards and {len(rewards)} rewards"
        )
    return raw, rewards


def _reward_value(args: BatchArgs, sample: Sample) -> float:
    what = f"sample {sample.index} of group {sample.group_index}"
    reward: Any = sample.reward
    if isinstance(reward, dict):
        parts = cast(dict[str, Any], reward)
        if args.reward_key is None or args.reward_key not in parts:
            raise ValueError(
                f"the reward of {what} has the parts {', '.join(sorted(parts))} and --reward-key is {args.reward_key}; "
                "name the part to train on with --reward-key"
            )
    value: Any = sample.get_reward_value(args)
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the reward of {what} must be a finite number, found {value!r:.80}")
    return float(value)


def _loss_mask(sample: Sample) -> Float32Array:
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.float32)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, dtype=np.float32)
    return np.asarray(sample.loss_mask, dtype=np.float32)


def _aligned_column(name: str, samples: list[Sample]) -> list[Float32Array] | None:
    """A response-aligned column; None unless every sample with a response has it."""
    rows = [getattr(sample, name) for sample in samples]
    missing = sum(row is None and sample.response_length > 0 for row, sample in zip(rows, samples, strict=True))
    if all(row is None for row in rows):
        return None
    if missing:
        logger.warning("%d of %d samples have no %s; the column is left out of this rollout", missing, len(rows), name)
        return None
    return [np.asarray(row if row is not None else [], dtype=np.float32) for row in rows]


def _span_column(samples: list[Sample]) -> list[tuple[VersionSpan, ...]] | None:
    """Spans of weight versions; None where no sample has any."""
    rows = [tuple(clip_spans(sample.weight_version_spans, sample.response_length)) for sample in samples]
    return rows if any(rows) else None


def _metadata_column(samples: list[Sample]) -> list[dict[str, Any] | None] | None:
    if all(sample.train_metadata is None for sample in samples):
        return None
    return [sample.train_metadata for sample in samples]


def _extra_columns(samples: list[Sample]) -> dict[str, list[Any]]:
    """Columns that only some runs have; present when any sample has a value."""
    columns: dict[str, list[Any]] = {"multimodal_train_inputs": [sample.multimodal_train_inputs for sample in samples]}
    columns["failed"] = [sample.status is Status.FAILED or None for sample in samples]
    columns["round_number"] = [sample.metadata.get("round_number") for sample in samples]
    sources = [get_source(sample) for sample in samples]
    columns["source_names"] = [None if source == "unknown" else source for source in sources]
    kept = {name: rows for name, rows in columns.items() if any(row is not None for row in rows)}
    if "failed" in kept:
        kept["failed"] = [bool(row) for row in kept["failed"]]
    if "source_names" in kept:
        kept["source_names"] = list(sources)
    if "round_number" in kept:
        kept["round_number"] = [row if row is not None else 0 for row in kept["round_number"]]
    return kept
