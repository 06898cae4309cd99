"""The process that makes training data: prompts, generation, grading, batches, evaluation.

Owns the data source and the rollout context of a run. Tests hold: the data state that comes with a
rollout is that of the rollout, not of the newest; replayed dumps need no engine; plug-ins see a
complete configuration; progress can be read while a rollout is in progress.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray

from slime.cluster.actor import ActorSetting, enter
from slime.cluster.checkpoints import take_data_state
from slime.cluster.rollout_metrics import evaluation_metrics, rollout_metrics
from slime.cluster.schedule import complete_schedule
from slime.config import ArgsView, Config
from slime.data.batch import build_rollout_batch
from slime.data.finite import screen_batch
from slime.data.foreign import build_data_source
from slime.data.record import load_rollout, regroup, save_rollout
from slime.data.source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.observability.progress import ProgressBoard, ProgressSnapshot
from slime.observability.tracking import Outbox
from slime.plugins import load_plugin
from slime.rollout.context import RolloutContext
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn

logger = logging.getLogger(__name__)

CONTROL_GROUP = "control"

Rows = list[tuple[dict[str, float], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """What the driver learns of one rollout besides its batch.

    ``plugin_rows`` are metrics that plug-ins logged, each with its step key. ``data_state`` is what a
    checkpoint of this rollout keeps of the data source; None when there is nothing to keep.
    """

    rollout_id: int
    num_samples: int
    metrics: dict[str, float]
    plugin_rows: Rows
    data_state: bytes | None = None


class RolloutManager:
    """Lives in its own process; one call at a time, besides those about progress."""

    def __init__(self, setting: ActorSetting, config: Config, facts: dict[str, Any]) -> None:
        """Take the configuration; ``start`` does the work.

        Args:
            setting: Log and directories.
            config: Resolved configuration.
            facts: Router address and number of engines; empty without engines.
        """
        enter(setting)
        self._config = config
        self._facts = facts
        self._outbox = Outbox()
        self._board, self._trainer_board = ProgressBoard(), ProgressBoard()
        self._args = self._flat_args()
        self._context: RolloutContext | None = None
        self._source: Any = None

    def start(self) -> int | None:
        """Read the data and load the plug-ins; returns rollouts per epoch where the data says so."""
        counted = self._count_rollouts() if self._config.data.num_rollout is None else None
        config = self._config
        if self._facts:
            self._context = RolloutContext.open(self._args, progress=self._board)
            self._args = self._context.args
        self._rollout_fn = self._load(config.rollout.rollout_function_path, "--rollout-function-path")
        eval_path = config.eval.eval_function_path
        self._eval_fn = self._load(eval_path, "--eval-function-path") if eval_path else self._rollout_fn
        if config.debug.load_debug_rollout_data:
            return None
        self._source = self._with_final_args(counted)
        return self._rollouts_per_epoch(self._source)

    def _count_rollouts(self) -> Any:
        """With ``--num-epoch``: know the number of rollouts before anything else of the user's sees ``args``.

        Returns:
            The data source that told it; None when dumps are replayed.
        """
        replayed = self._config.debug.load_debug_rollout_data is not None
        source = None if replayed else build_data_source(self._args)
        per_epoch = None if source is None else self._rollouts_per_epoch(source)
        self._config = complete_schedule(self._config, per_epoch)
        self._args = self._flat_args()
        return source

    def _with_final_args(self, counted: Any) -> Any:
        """The data source; one that was only built to be counted has read its prompts already.

        A user's class may have taken from ``args`` what was not there yet, so it is built anew.
        """
        if type(counted) not in (RolloutDataSource, RolloutDataSourceWithBuffer):
            return build_data_source(self._args)
        counted.args = self._args
        return counted

    def _rollouts_per_epoch(self, source: Any) -> int | None:
        data = self._config.data
        return len(source) // data.rollout_batch_size or None if self._has_prompts else None

    def _flat_args(self) -> Any:
        return ArgsView(self._config).with_facts(metric_sink=self._outbox, **self._facts)

    @property
    def _has_prompts(self) -> bool:
        return self._config.data.rollout_global_dataset

    def load(self, rollout_id: int) -> None:
        """Continue with the data after rollout ``rollout_id``."""
        if self._source is not None and self._has_prompts:
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
        data_state = self._data_state(rollout_id)
        if config.debug.save_debug_rollout_data and not config.debug.load_debug_rollout_data:
            save_rollout(config.debug.save_debug_rollout_data, rollout_id, groups)
        batch, not_finite = screen_batch(build_rollout_batch(self._args, rollout_id, groups))
        metrics = rollout_metrics(self._args, rollout_id, groups, extra, seconds, batch)
        report = RolloutReport(
            rollout_id=rollout_id,
            num_samples=len(batch),
            metrics={
                **metrics,
                **self._reissued(),
                "rollout/not_finite_samples_count": float(not_finite),
            },
            plugin_rows=self._outbox.take(),
            data_state=data_state,
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
        return evaluation_metrics(self._args, rollout_id, output), self._outbox.take()

    def _reissued(self) -> dict[str, float]:
        """Requests issued again since the last rollout; nothing where that does not happen."""
        reissues = None if self._context is None else self._context.client.reissues
        return {} if reissues is None else {"rollout/requests_reissued": float(reissues.take_count())}

    def _data_state(self, rollout_id: int) -> bytes | None:
        if self._source is None or not self._has_prompts:
            return None
        self._source.snapshot(rollout_id)
        return None if self._config.checkpoint.save is None else take_data_state(self._source, rollout_id)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def progress(self) -> list[ProgressSnapshot]:
        """What is in progress here and, as it was told, in the trainer; answers also during a rollout."""
        newest = (self._board.snapshot(), self._trainer_board.snapshot())
        return [entry for entry in newest if entry is not None and entry.done < entry.total]

    @ray.method(concurrency_group=CONTROL_GROUP)
    def suspects(self) -> dict[str, str]:
        """Engines that requests get bad answers from, and the fault; answers also during a rollout."""
        reissues = None if self._context is None else self._context.client.reissues
        return {} if reissues is None else reissues.suspects

    @ray.method(concurrency_group=CONTROL_GROUP)
    def show_progress(self, label: str, done: int, total: int) -> None:
        """Take in how far the trainer is with ``label``."""
        self._trainer_board.report(label, done, total, unit="micro-batches")

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

    @staticmethod
    def _load(path: str, flag: str) -> Any:
        return load_plugin(path, flag=flag, kind="other")
