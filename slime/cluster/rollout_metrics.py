"""Metrics of a finished rollout or evaluation, with what users' log functions change about them.

Tests hold: evaluation metrics carry the names of their sets; a log function that returns true
replaces what it was given.
"""

from __future__ import annotations

import statistics
from typing import Any

from slime.config import Config
from slime.observability.metrics import (
    RolloutMetricOptions,
    compute_batch_metrics,
    compute_rollout_metrics,
    compute_sample_metrics,
    flatten_group,
    pass_rate_by_group,
)
from slime.plugins import load_plugin
from slime.rollout.types import RolloutFnEvalOutput


def metric_options(config: Config) -> RolloutMetricOptions:
    """What the metrics of a rollout depend on."""
    return RolloutMetricOptions(
        reward_key=config.reward.reward_key,
        num_gpus=config.cluster.rollout_num_gpus or 0,
        count_zero_std=config.algorithm.advantage_estimator != "ppo",
        log_passrate=config.logging.log_passrate,
        log_multi_turn=config.logging.log_multi_turn,
        log_correct_samples=config.logging.log_correct_samples,
        reward_category_key=config.logging.log_reward_category,
        max_response_len=config.rollout.rollout_max_response_len,
        speculative=bool(config.sglang.get("speculative_algorithm")),
    )


def rollout_metrics(
    args: Any, rollout_id: int, groups: Any, extra: dict[str, Any], seconds: float, batch: Any
) -> dict[str, float]:
    """Metrics of one training rollout.

    Args:
        args: Flat arguments.
        rollout_id: Which rollout.
        groups: What was generated, or read from a dump.
        extra: What the rollout function returned besides.
        seconds: How long it took.
        batch: The ``RolloutBatch`` made of it.
    """
    config: Config = args.config
    metrics = {**compute_batch_metrics(batch), "perf/rollout_time": seconds}
    if config.algorithm.loss_type == "sft_loss":  # nothing is graded
        metrics = {k: v for k, v in metrics.items() if k not in ("rollout/raw_reward", "rollout/rewards")}
    path = config.rollout.custom_rollout_log_function_path
    if path:
        samples = [s for group in groups for s in flatten_group(group)]
        log_fn = load_plugin(path, flag="--custom-rollout-log-function-path", kind="other")
        if log_fn(rollout_id, args, samples, extra, seconds):
            return metrics
    if config.debug.load_debug_rollout_data is not None:
        return metrics
    return {**compute_rollout_metrics(groups, metric_options(config), seconds), **metrics, **_numbers(extra)}


def evaluation_metrics(args: Any, rollout_id: int, output: RolloutFnEvalOutput) -> dict[str, float]:
    """``eval/*`` of all held-out sets; empty if the user's log function took care of them."""
    config: Config = args.config
    path = config.rollout.custom_eval_rollout_log_function_path
    if path:
        log_fn = load_plugin(path, flag="--custom-eval-rollout-log-function-path", kind="other")
        if log_fn(rollout_id, args, output.data, output.metrics):
            return {}
    return {**_set_metrics(output, metric_options(config), config), **_numbers(output.metrics or {})}


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The entries that are numbers; plug-ins may return others."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}


def _set_metrics(output: RolloutFnEvalOutput, options: RolloutMetricOptions, config: Config) -> dict[str, float]:
    """``eval/{name}`` (mean reward) and the statistics of each held-out set."""
    metrics: dict[str, float] = {}
    repeats = {d.name: d.n_samples_per_eval_prompt or 1 for d in config.eval.eval_datasets}
    for name, result in output.data.items():
        rewards = [float(r) for r in result["rewards"]]
        if rewards:
            metrics[f"eval/{name}"] = statistics.fmean(rewards)
        truncated = [float(t) for t in result.get("truncated", [])]
        if truncated:
            metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(truncated)
        samples = result.get("samples", [])
        metrics.update({f"eval/{name}/{k}": v for k, v in compute_sample_metrics(samples, options).items()})
        n = repeats.get(name, 1)
        if options.log_passrate and n > 1:
            # Functions of users may know no ids; their samples come prompt by prompt.
            group_ids = result.get("group_ids") or [i // n for i in range(len(rewards))]
            metrics.update(pass_rate_by_group(rewards, group_ids, f"eval/{name}-"))
    return metrics
