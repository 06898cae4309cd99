"""Metrics of one rollout, and how each metric is reduced.

Owns the names ``rollout/*``, ``multi_turn/*``, ``passrate/*`` and the throughput part of
``perf/*``. It leaves out where numbers are sent. Tests hold: group statistics go by group, not by
position; pass@k is the unbiased estimator; every key this module makes has a declared reduction.
"""

from __future__ import annotations

import math
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from slime.types import RolloutBatch, Sample, Status

_REPETITION_CHARACTERS = 10000
_REPETITION_RATIO = 10.0


class Reduction(Enum):
    """How values of one metric from several steps or ranks become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


# First match wins; what is not listed is a mean.
_REDUCTIONS: tuple[tuple[re.Pattern[str], Reduction], ...] = (
    (re.compile(r"/step$"), Reduction.LAST),
    (re.compile(r"/(zero_std/count_|dynamic_filter/drop_)"), Reduction.SUM),
    (re.compile(r"/count$|_count$|/unparsed$|/timeouts$"), Reduction.SUM),
    (re.compile(r"/engine_restarts$|/requests_reissued$"), Reduction.SUM),
    (re.compile(r"(/|_)max$"), Reduction.MAX),
    (re.compile(r"(/|_)min$"), Reduction.MIN),
    # A quantile of several steps together is not known; the worst step's is reported.
    (re.compile(r"_p99$"), Reduction.MAX),
    (re.compile(r"^perf/.*_time$"), Reduction.SUM),
    (re.compile(r"^perf/.*_(bytes|tokens)$"), Reduction.SUM),
    (re.compile(r"^(critic-)?train/(lr-|global_batch_size|weight_version)"), Reduction.LAST),
)


def reduction_of(key: str) -> Reduction:
    """The declared reduction of a metric."""
    return next((reduction for pattern, reduction in _REDUCTIONS if pattern.search(key)), Reduction.MEAN)


def reduce_metrics(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge rows of metrics from several steps or ranks, each key by its declared reduction."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    reducers: dict[Reduction, Callable[[list[float]], float]] = {
        Reduction.MEAN: statistics.fmean,
        Reduction.SUM: math.fsum,
        Reduction.MAX: max,
        Reduction.MIN: min,
        Reduction.LAST: lambda values: values[-1],
    }
    return {key: reducers[reduction_of(key)](values) for key, values in columns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMetricOptions:
    """What shapes the metrics of a rollout.

    ``count_zero_std`` is off for estimators without a group baseline. ``max_response_len`` is the
    token limit that counts as clipped in multi-turn statistics.
    """

    reward_key: str | None = None
    num_gpus: int = 1
    count_zero_std: bool = True
    log_passrate: bool = False
    log_multi_turn: bool = False
    log_correct_samples: bool = False
    reward_category_key: str | None = None
    max_response_len: int | None = None
    speculative: bool = False


SampleGroups = Sequence[Sequence[Sample | Sequence[Sample]]]
"""Groups as a rollout returns them: an item of a group may itself be a fan-out list."""


def flatten_group(group: Sequence[Sample | Sequence[Sample]]) -> list[Sample]:
    """All samples of one group, fan-out lists opened."""
    return [s for item in group for s in ([item] if isinstance(item, Sample) else item)]


def compute_statistics(values: Sequence[float], prefix: str) -> dict[str, float]:
    """Mean, median, maximum and minimum under ``prefix/``; empty for no values."""
    if not values:
        return {}
    return {
        f"{prefix}/mean": statistics.fmean(values),
        f"{prefix}/median": float(statistics.median(values)),
        f"{prefix}/max": float(max(values)),
        f"{prefix}/min": float(min(values)),
    }


def compute_sample_metrics(samples: Sequence[Sample], options: RolloutMetricOptions) -> dict[str, float]:
    """Statistics that need no grouping: lengths, truncation, repetition, caches.

    Args:
        samples: Flat list.
        options: See ``RolloutMetricOptions``.

    Returns:
        Keys without the ``rollout/`` prefix, so that evaluation can use them under its own.
    """
    if not samples:
        return {}
    n = len(samples)
    metrics = compute_statistics([float(s.effective_response_length) for s in samples], "response_len")
    metrics["truncated_ratio"] = sum(s.status is Status.TRUNCATED for s in samples) / n
    metrics["repetition_frac"] = sum(is_repetitive(s.response) for s in samples) / n
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    if prompt_tokens:
        cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
        metrics["prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics["avg_cached_tokens_per_sample"] = cached / n
    if options.speculative:
        metrics["spec_accept_rate"] = statistics.fmean(s.spec_info.spec_accept_rate for s in samples)
        metrics["spec_accept_length"] = statistics.fmean(s.spec_info.spec_accept_length for s in samples)
    key = options.reward_category_key
    if key:
        categories = Counter(str(s.reward[key]) for s in samples if isinstance(s.reward, dict) and key in s.reward)
        metrics.update({f"error_cat/{name}": count / n for name, count in categories.items()})
    metrics.update(_top_p_metrics(samples))
    return metrics


def prompt_mismatch(samples: Sequence[Sample]) -> float | None:
    """Share of samples whose prompt had another number of tokens in the engine than it has in training.

    Only samples of a single completion say; None if there are none.
    """
    told = [s for s in samples if len(s.weight_versions) == 1 and s.prefix_cache_info.total_prompt_tokens]
    if not told:
        return None
    return sum(s.prefix_cache_info.total_prompt_tokens != len(s.tokens) - s.response_length for s in told) / len(told)


def compute_rollout_metrics(
    groups: SampleGroups, options: RolloutMetricOptions, rollout_seconds: float | None = None
) -> dict[str, float]:
    """All metrics of one training rollout.

    Args:
        groups: Kept groups, one per prompt.
        options: See ``RolloutMetricOptions``.
        rollout_seconds: Duration of generation and grading; None leaves throughput out.
    """
    flat_groups = [flatten_group(group) for group in groups]
    samples = [s for group in flat_groups for s in group]
    metrics = {f"rollout/{k}": v for k, v in compute_sample_metrics(samples, options).items()}
    rewards = [_graded_rewards(group, options.reward_key) for group in flat_groups]
    if options.count_zero_std:
        constant = Counter(round(row[0], 1) for row in rewards if len(row) > 1 and all(r == row[0] for r in row))
        metrics.update({f"rollout/zero_std/count_{value}": float(count) for value, count in constant.items()})
    if options.log_passrate:
        metrics.update(pass_rate_metrics(rewards, "passrate/"))
    if options.log_correct_samples:
        metrics.update(_correct_sample_metrics(samples, options.reward_key))
    if options.log_multi_turn:
        metrics.update(_multi_turn_metrics(samples, options.max_response_len))
    mismatch = prompt_mismatch(samples)
    if mismatch is not None:
        metrics["rollout/prompt_mismatch"] = mismatch
    if rollout_seconds is not None:
        metrics.update(compute_perf_metrics(samples, rollout_seconds, options.num_gpus))
    return metrics


def compute_perf_metrics(samples: Sequence[Sample], rollout_seconds: float, num_gpus: int) -> dict[str, float]:
    """Time and throughput of one rollout; ``effective_`` counts trained tokens only."""
    metrics = {"perf/rollout_time": rollout_seconds}
    if not samples or rollout_seconds <= 0:
        return metrics
    gpus = max(num_gpus, 1)
    for prefix, lengths in (
        ("", [s.response_length for s in samples]),
        ("effective_", [s.effective_response_length for s in samples]),
    ):
        metrics[f"perf/{prefix}tokens_per_gpu_per_sec"] = sum(lengths) / rollout_seconds / gpus
        metrics[f"perf/longest_{prefix}sample_tokens_per_sec"] = max(lengths) / rollout_seconds
    elsewhere = [s.non_generation_time for s in samples]
    if any(elsewhere):
        metrics.update(compute_statistics(elsewhere, "perf/non_generation_time"))
        longest = max(samples, key=lambda s: s.response_length)
        metrics["perf/longest_sample_non_generation_time"] = longest.non_generation_time
        generating = max(rollout_seconds - longest.non_generation_time, 1e-9)
        metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] = longest.response_length / generating
    return metrics


def compute_batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Plain means of the columns that go to training; rewards only of samples that were graded."""
    if not len(batch):
        return {}
    failed = batch.extra.get("failed") or [False] * len(batch)
    graded = [i for i, has_failed in enumerate(failed) if not has_failed]
    columns: dict[str, Sequence[float]] = {
        "rewards": [batch.rewards[i] for i in graded],
        "raw_reward": [batch.raw_rewards[i] for i in graded],
        "response_lengths": [float(n) for n in batch.response_lengths],
        "total_lengths": [float(n) for n in batch.total_lengths],
        "truncated": [float(t) for t in batch.truncated],
    }
    metrics = {f"rollout/{name}": statistics.fmean(column) for name, column in columns.items() if column}
    penalties = [batch.extra["overlong_penalty"][i] for i in graded] if "overlong_penalty" in batch.extra else []
    if penalties:
        metrics["rollout/overlong_penalty"] = statistics.fmean(penalties)
        metrics["rollout/overlong_frac"] = sum(p < 0 for p in penalties) / len(penalties)
    num_tokens = sum(batch.response_lengths)
    if num_tokens:
        metrics["rollout/masked_frac"] = 1 - sum(float(mask.sum()) for mask in batch.loss_masks) / num_tokens
    versions = [[int(v) for v in sample if v.isdigit()] for sample in batch.weight_versions]
    known = [row for row in versions if row]
    if known:
        metrics["rollout/weight_version/min"] = float(min(min(row) for row in known))
        metrics["rollout/weight_version/max"] = float(max(max(row) for row in known))
        metrics["rollout/mixed_weight_versions"] = sum(len(set(row)) > 1 for row in known) / len(known)
    if batch.rollout_log_probs is not None:
        pairs = zip(batch.rollout_log_probs, batch.loss_masks, strict=True)
        sums = [(float(p[m > 0].sum()), float(m.sum())) for p, m in pairs]  # masked entries may hold anything
        means = [total / count for total, count in sums if count]
        if means:
            metrics["rollout/rollout_log_probs"] = statistics.fmean(means)
    return metrics


def pass_rate_metrics(rewards: Sequence[Sequence[float]], prefix: str) -> dict[str, float]:
    """``{prefix}pass@k`` for k = 1, 2, 4 … up to the smallest group; nothing for single samples.

    Args:
        rewards: One row per prompt; a reward of exactly 1 is a pass.
        prefix: Put before the key.
    """
    rows = [row for row in rewards if row]
    if not rows or min(len(row) for row in rows) < 2:
        return {}
    smallest = min(len(row) for row in rows)
    metrics: dict[str, float] = {}
    k = 1
    while k <= smallest:
        rates = [estimate_pass_at_k(len(row), sum(r == 1 for r in row), k) for row in rows]
        metrics[f"{prefix}pass@{k}"] = statistics.fmean(rates)
        k *= 2
    return metrics


def pass_rate_by_group(rewards: Sequence[float], group_ids: Sequence[int], prefix: str) -> dict[str, float]:
    """``pass_rate_metrics`` of samples in any order and groups of any size.

    Args:
        rewards: One per sample.
        group_ids: The prompt group of each sample.
        prefix: Put before the key.
    """
    rows: dict[int, list[float]] = {}
    for reward, group in zip(rewards, group_ids, strict=True):
        rows.setdefault(group, []).append(reward)
    return pass_rate_metrics(list(rows.values()), prefix)


def estimate_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k, 1 - C(n-c, k) / C(n, k) (https://arxiv.org/abs/2107.03374)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def is_repetitive(text: str) -> bool:
    """Whether the end of a long text compresses so well that it must repeat itself."""
    if len(text) <= _REPETITION_CHARACTERS:
        return False
    data = text[-_REPETITION_CHARACTERS:].encode("utf-8", errors="replace")
    return len(data) / len(zlib.compress(data, 9)) > _REPETITION_RATIO


def _graded_rewards(group: Sequence[Sample], reward_key: str | None) -> list[float]:
    """Rewards of a group without those of failed samples, which nothing graded."""
    return [_scalar_reward(s, reward_key) for s in group if s.status is not Status.FAILED]


def _scalar_reward(sample: Sample, reward_key: str | None) -> float:
    reward: Any = sample.reward
    if reward_key and isinstance(reward, dict):
        reward = cast("dict[str, Any]", reward)[reward_key]
    return float(reward) if isinstance(reward, int | float) else math.nan


def _correct_sample_metrics(samples: Sequence[Sample], reward_key: str | None) -> dict[str, float]:
    """Share, lengths and truncation of the samples with a reward of exactly 1, which is a pass."""
    graded = [s for s in samples if s.status is not Status.FAILED]
    correct = [s for s in graded if _scalar_reward(s, reward_key) == 1]
    metrics = {"rollout/correct/ratio": len(correct) / len(graded)} if graded else {}
    if correct:
        lengths = [float(s.effective_response_length) for s in correct]
        metrics.update(compute_statistics(lengths, "rollout/correct/response_len"))
        truncated = sum(s.status is Status.TRUNCATED for s in correct)
        metrics["rollout/correct/truncated_ratio"] = truncated / len(correct)
    return metrics


def _top_p_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean number of vocabulary entries kept by top-p, over trained tokens."""
    kept = tokens = 0
    for sample in samples:
        offsets = sample.rollout_top_p_token_offsets
        if offsets is None:
            continue
        mask = sample.loss_mask or [1] * sample.response_length
        for i, trained in enumerate(mask):
            if trained:
                kept += int(offsets[i + 1] - offsets[i])
                tokens += 1
    return {"top_p_kept_vocab_per_token": kept / tokens} if tokens else {}


def _multi_turn_metrics(samples: Sequence[Sample], max_response_len: int | None) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, lengths in (
        ("raw_response_length", [float(s.response_length) for s in samples]),
        ("wo_obs_response_length", [float(s.effective_response_length) for s in samples]),
    ):
        prefix = f"multi_turn/{name}/response_length"
        if not lengths:
            continue
        metrics[f"{prefix}_mean"] = statistics.fmean(lengths)
        metrics[f"{prefix}_max"], metrics[f"{prefix}_min"] = max(lengths), min(lengths)
        if max_response_len:
            metrics[f"{prefix}_clip_ratio"] = sum(n >= max_response_len for n in lengths) / len(lengths)
    rounds = [float(s.metadata["round_number"]) for s in samples if "round_number" in s.metadata]
    if rounds:
        prefix = "multi_turn/multi_turn_metric/round_number"
        metrics[f"{prefix}_mean"] = statistics.fmean(rounds)
        metrics[f"{prefix}_max"], metrics[f"{prefix}_min"] = max(rounds), min(rounds)
    return metrics
