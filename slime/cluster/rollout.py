"""The process that makes training data: prompts, generation, grading, batches, evaluation.

Owns the data source and the rollout context of a run, and their state per rollout. Tests hold:
the saved data state is that of the rollout asked for, not of the newest; replayed dumps need no
engine; evaluation metrics carry the names of their sets.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slime.cluster import waits
from slime.cluster.actor import ActorSetting, enter
from slime.config import ArgsView, Config
from slime.data.batch import build_rollout_batch
from slime.data.foreign import build_data_source
from slime.data.record import load_rollout, regroup, save_rollout
from slime.errors import EngineError, SlimeError
from slime.observability.metrics import (
    RolloutMetricOptions,
    compute_batch_metrics,
    compute_rollout_metrics,
    compute_sample_metrics,
    flatten_group,
    pass_rate_metrics,
)
from slime.observability.tracking import Outbox
from slime.plugins import load_plugin
from slime.rollout.context import RolloutContext
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn

logger = logging.getLogger(__name__)

Rows = list[tuple[dict[str, float], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """What the driver learns of one rollout besides its batch.

    ``plugin_rows`` are metrics that plug-ins logged, each with its step key.
    """

    rollout_id: int
    num_samples: int
    metrics: dict[str, float]
    plugin_rows: Rows


class RolloutManager:
    """Lives in its own process; one call at a time."""

    def __init__(self, setting: ActorSetting, config: Config, facts: dict[str, Any]) -> None:
        """Take the configuration; ``start`` does the work.

        Args:
            setting: Log and directories.
            config: Resolved configuration.
            facts: Router address and number of engines; empty without engines.
        """
        enter(setting)
        self._config = config
        self._outbox = Outbox()
        self._args: Any = ArgsView(config).with_facts(metric_sink=self._outbox, **facts)
        self._has_engines = bool(facts)
        self._context: RolloutContext | None = None
        self._source: Any = None

    def start(self) -> int | None:
        """Read the data and load the plug-ins; returns rollouts per epoch where the data says so."""
        config = self._config
        if self._has_engines:
            self._context = RolloutContext.open(self._args)
            self._args = self._context.args
        self._rollout_fn = self._load(config.rollout.rollout_function_path, "--rollout-function-path")
        eval_path = config.eval.eval_function_path
        self._eval_fn = self._load(eval_path, "--eval-function-path") if eval_path else self._rollout_fn
        if config.debug.load_debug_rollout_data:
            return None
        self._source = build_data_source(self._args)
        num_prompts = len(self._source) if config.data.rollout_global_dataset else 0
        return num_prompts // config.data.rollout_batch_size or None

    def load(self, rollout_id: int) -> None:
        """Continue with the data after rollout ``rollout_id``."""
        if self._source is not None and self._config.data.rollout_global_dataset:
            self._source.load(rollout_id)

    def generate(self, rollout_id: int) -> tuple[Any, RolloutReport]:
        """Make the batch of one rollout.

        Returns:
            The ``RolloutBatch`` and its report, as two objects of the object store.
        """
        config, started = self._config, time.monotonic()
        extra: dict[str, Any] = {}
        if config.debug.load_debug_rollout_data:
            samples = load_rollout(
                config.debug.load_debug_rollout_data,
                rollout_id,
                subsample=config.debug.load_debug_rollout_data_subsample,
            )
            groups: Any = regroup(samples)
        else:
            output = self._call(self._rollout_fn, rollout_id, evaluation=False)
            assert isinstance(output, RolloutFnTrainOutput)
            groups, extra = output.samples, output.metrics or {}
        seconds = time.monotonic() - started
        if self._source is not None:
            self._source.snapshot(rollout_id)  # what save(rollout_id) will write, however far rollouts run ahead
        if config.debug.save_debug_rollout_data and not config.debug.load_debug_rollout_data:
            save_rollout(config.debug.save_debug_rollout_data, rollout_id, groups)
        batch = build_rollout_batch(self._args, rollout_id, groups)
        report = RolloutReport(
            rollout_id=rollout_id,
            num_samples=len(batch),
            metrics=self._rollout_metrics(rollout_id, groups, extra, seconds, batch),
            plugin_rows=self._outbox.take(),
        )
        return batch, report

    def evaluate(self, rollout_id: int) -> tuple[dict[str, float], Rows]:
        """Score the held-out sets.

        Returns:
            Metrics under ``eval/``, and what plug-ins logged.
        """
        output = self._call(self._eval_fn, rollout_id, evaluation=True)
        assert isinstance(output, RolloutFnEvalOutput)
        config = self._config
        if config.debug.save_debug_rollout_data:
            groups = [[sample] for result in output.data.values() for sample in result.get("samples", [])]
            save_rollout(config.debug.save_debug_rollout_data, rollout_id, groups, evaluation=True)
        path = config.rollout.custom_eval_rollout_log_function_path
        if path:
            log_fn = self._load(path, "--custom-eval-rollout-log-function-path")
            if log_fn(rollout_id, self._args, output.data, output.metrics):
                return {}, self._outbox.take()
        metrics = {**eval_metrics(output, self._metric_options(), self._config), **numbers(output.metrics or {})}
        return metrics, self._outbox.take()

    def save(self, rollout_id: int) -> None:
        """Write the data state as it was right after ``rollout_id``."""
        if self._source is not None and self._config.data.rollout_global_dataset:
            self._source.save(rollout_id)

    def close(self) -> None:
        """End connections and grader processes."""
        if self._context is not None:
            self._context.close()
            self._context = None

    def _call(self, fn: Any, rollout_id: int, *, evaluation: bool) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        try:
            if self._context is None:
                return call_rollout_fn(fn, self._args, rollout_id, self._source, evaluation=evaluation)
            run = self._context.evaluate if evaluation else self._context.generate
            return run(fn, rollout_id, self._source)
        except Exception:  # process boundary: the driver shows the cause, the log has the whole story
            logger.info("rollout %d failed", rollout_id, exc_info=True)
            raise

    def _rollout_metrics(
        self, rollout_id: int, groups: Any, extra: dict[str, Any], seconds: float, batch: Any
    ) -> dict[str, float]:
        config = self._config
        replay = config.debug.load_debug_rollout_data is not None
        metrics = compute_batch_metrics(batch)
        path = config.rollout.custom_rollout_log_function_path
        if path:
            samples = [s for group in groups for s in flatten_group(group)]
            log_fn = self._load(path, "--custom-rollout-log-function-path")
            if log_fn(rollout_id, self._args, samples, extra, seconds):
                return {**metrics, "perf/rollout_time": seconds}
        if replay:
            return {**metrics, "perf/rollout_time": seconds}
        return {**compute_rollout_metrics(groups, self._metric_options(), seconds), **metrics, **numbers(extra)}

    def _metric_options(self) -> RolloutMetricOptions:
        config = self._config
        return RolloutMetricOptions(
            reward_key=config.reward.reward_key,
            num_gpus=config.cluster.rollout_num_gpus or 0,
            count_zero_std=config.algorithm.advantage_estimator != "ppo",
            log_passrate=config.logging.log_passrate,
            log_multi_turn=config.logging.log_multi_turn,
            reward_category_key=config.logging.log_reward_category,
            max_response_len=config.rollout.rollout_max_response_len,
            speculative=bool(config.sglang.get("speculative_algorithm")),
        )

    @staticmethod
    def _load(path: str, flag: str) -> Any:
        return load_plugin(path, flag=flag, kind="other")


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The entries that are numbers; plug-ins may return others."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}


def eval_metrics(output: RolloutFnEvalOutput, options: RolloutMetricOptions, config: Config) -> dict[str, float]:
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
            rows = [rewards[i : i + n] for i in range(0, len(rewards), n)]
            metrics.update(pass_rate_metrics(rows, f"eval/{name}-"))
    return metrics


class RolloutHandle:
    """The driver's side of the rollout process; every call is bounded."""

    def __init__(self, config: Config, log_dir: Path, facts: dict[str, Any], *, manager: type = RolloutManager) -> None:
        """Start the process.

        Args:
            config: Resolved configuration.
            log_dir: Where ``rollout.log`` is written.
            facts: See ``RolloutManager``.
            manager: The class to host.
        """
        self._config = config
        self._setting = ActorSetting.of("rollout", log_dir)
        self._actor = ray.remote(manager).options(**waits.on_this_node()).remote(self._setting, config, facts)
        self._check: Callable[[], None] = lambda: None
        self._closed = False

    def watch(self, check: Callable[[], None]) -> None:
        """Call ``check`` while waiting; it raises when an engine is gone."""
        self._check = check

    def start(self) -> int | None:
        """Read data, load plug-ins; returns rollouts per epoch, or None where the data does not say."""
        return self._wait(self._actor.start.remote(), "read the data", self._limit)

    def load(self, rollout_id: int) -> None:
        """Continue with the data after ``rollout_id``."""
        self._wait(self._actor.load.remote(rollout_id), f"load the data state of rollout {rollout_id}", self._limit)

    def submit(self, rollout_id: int) -> tuple[Any, Any]:
        """Begin rollout ``rollout_id``; references to its batch and its report."""
        return self._actor.generate.options(num_returns=2).remote(rollout_id)

    def report(self, reference: Any, rollout_id: int) -> RolloutReport:
        """Wait for a rollout that was begun."""
        return self._wait(reference, f"generate rollout {rollout_id}", self._limit)

    def evaluate(self, rollout_id: int) -> tuple[dict[str, float], Rows]:
        """Score the held-out sets."""
        return self._wait(self._actor.evaluate.remote(rollout_id), "evaluate", self._limit)

    def save(self, rollout_id: int) -> None:
        """Write the data state of ``rollout_id``."""
        limit = self._config.cluster.save_timeout_seconds
        self._wait(self._actor.save.remote(rollout_id), f"save the data state of rollout {rollout_id}", limit)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End the process."""
        if self._closed:
            return
        self._closed = True
        ray.wait([self._actor.close.remote()], timeout=timeout_seconds)
        ray.kill(self._actor)

    @property
    def _limit(self) -> float:
        return self._config.cluster.rollout_timeout_seconds

    def _wait(self, reference: Any, doing: str, limit: float) -> Any:
        try:
            return waits.get(
                reference,
                waited_for=f"the rollout process to {doing}",
                timeout_seconds=limit,
                check=self._check,
                on_death=lambda _: self._death(doing),
            )
        except SlimeError:
            self._check()  # a dead engine explains more than the request that failed because of it
            raise

    def _death(self, doing: str) -> SlimeError:
        return EngineError(f"the rollout process died while it was to {doing}; {self._setting.log_tail()}")
