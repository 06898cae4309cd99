"""One run, seen from the loop: the verbs of ``train.py`` and what each does in every mode.

Owns the order inside a step that the loop does not show: when who takes the devices (how is
``device_turns``'), when a step is reported, what is saved together. Tests hold: memory turns never
overlap; a resumed run starts after the loaded iteration; data state and weights of a checkpoint belong
to the same rollout.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cluster.actor_critic import ActorCritic
from slime.cluster.async_rollouts import AsyncRollouts
from slime.cluster.checkpoints import prune_data_states, write_data_state
from slime.cluster.device_turns import DeviceTurns
from slime.cluster.engines import EngineGroup
from slime.cluster.recovery import Recovery
from slime.cluster.released_trainer import ReleasedTrainer
from slime.cluster.rollout import RolloutReport
from slime.cluster.rollout_handle import RolloutHandle
from slime.cluster.schedule import should_run_periodic_action
from slime.cluster.trainer import TrainerGroup
from slime.cluster.weight_sync import WeightSync
from slime.config import Config
from slime.observability.report import Reporter

logger = logging.getLogger(__name__)

_ENGINES_END_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRollout:
    """A finished rollout: the reference to its batch, and its report."""

    batch: Any
    report: RolloutReport


class Generation:
    """``run.rollout``: makes the batch of a step and records its metrics."""

    def __init__(self, handle: RolloutHandle, reporter: Reporter, recovery: Recovery | None = None) -> None:
        self._handle = handle
        self._reporter = reporter
        self._recovery = recovery

    def generate(self, step: int) -> GeneratedRollout:
        """Generate, grade and batch one rollout; returns when it is complete."""
        batch, report_ref = self._handle.submit(step)
        report = self._handle.report(report_ref, step)
        self._reporter.add(step, {**report.metrics, "rollout/num_samples": report.num_samples})
        if self._recovery is not None:
            self._reporter.add(step, self._recovery.rollout_complete())
        for metrics, step_key in report.plugin_rows:
            self._reporter.tracking.log(metrics, step_key)
        return GeneratedRollout(batch=batch, report=report)


class Training:
    """``run.trainer``: trains the batch of a step and records its metrics."""

    def __init__(self, group: TrainerGroup | ActorCritic | ReleasedTrainer | None, reporter: Reporter) -> None:
        self._group = group
        self._reporter = reporter
        self.last_trained: RolloutReport | None = None
        self.in_progress: RolloutReport | None = None

    def train(self, step: int, rollout: GeneratedRollout) -> dict[str, float]:
        """Train one rollout on all ranks; returns the metrics of rank 0."""
        if self._group is None:
            return {}
        self.in_progress = rollout.report
        started = time.monotonic()
        metrics = self._group.train(rollout.batch, step)
        self.last_trained, self.in_progress = rollout.report, None
        self._reporter.add_optimizer_steps(step, self._group.step_metrics())
        self._reporter.add(step, {**metrics, "perf/train_time": time.monotonic() - started})
        return metrics


class Run:
    """Everything of one run that is up; made by ``launch``, which also ends it."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        reporter: Reporter,
        rollout: RolloutHandle,
        engines: EngineGroup | None,
        trainer: TrainerGroup | ActorCritic | ReleasedTrainer | None,
        first_step: int,
        num_rollout: int,
        num_rollout_per_epoch: int | None,
        recovery: Recovery | None = None,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.reporter = reporter
        self.rollout = Generation(rollout, reporter, recovery)
        self.trainer = Training(trainer, reporter)
        self.first_step = first_step
        self.num_rollout = num_rollout
        self._per_epoch = num_rollout_per_epoch
        self._handle = rollout
        self._engines = engines
        self._group = trainer
        self._recovery = recovery
        self._sync = None
        if trainer is not None and engines is not None:
            idle_seconds = config.weights.weight_sync_timeout_seconds
            self._sync = WeightSync(trainer, engines, recovery, prepare=self._meet, idle_seconds=idle_seconds)
            if recovery is not None and not config.cluster.offload_rollout:  # the trainer need not come back first
                recovery.bring_weights_with(self._bring_weights)
        self._last_saved: int | None = None
        self._saving: int | None = None  # inside the call to the trainer
        self._in_background: int | None = None  # its files may still be written
        self._step_started = time.monotonic()
        self._turns = DeviceTurns(config.cluster, trainer, engines, releases_trainer=config.train.release_train)
        if recovery is not None:
            recovery.match_memory(self._turns.released_tags)

    def steps(self) -> Iterator[int]:
        """The steps that are left; each is reported when the loop comes back for the next."""
        self._step_started = time.monotonic()
        for step in range(self.first_step, self.num_rollout):
            yield step
            self._note_background_save()
            self._report(step)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Engines hold the devices; inside a split placement they always do."""
        self._to_engines()
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """The trainer holds the devices; inside a split placement it always does."""
        if self.config.cluster.offload_rollout:
            self._settle()
        self._turns.to_trainer()
        yield

    def sync_weights(self) -> None:
        """Bring every engine to the trainer's weights and verify the version.

        Raises:
            WeightSyncError: An engine reports another version than the trainer sent.
        """
        if self._sync is None:
            return
        started = time.monotonic()
        self._meet()
        metrics = self._sync.send()
        if self._recovery is not None:
            self._recovery.serve()
        self._to_engines()
        last, memory = self.trainer.last_trained, self._turns.take_memory()
        if last is not None:
            seconds = time.monotonic() - started
            self.reporter.add(last.rollout_id, {**metrics, **memory, "perf/sync_time": seconds})

    def _bring_weights(self) -> None:
        """Send the weights once more, while a rollout waits for engines that know none."""
        assert self._sync is not None
        assert self._recovery is not None
        self._meet()
        self._sync.send()
        self._recovery.serve()
        self._to_engines()

    def sync_due(self, step: int) -> bool:
        """Whether the engines get new weights after ``step``."""
        return (step + 1) % self.config.weights.update_weights_interval == 0 or step == self.num_rollout - 1

    def evaluate_before_training(self) -> None:
        """Score the held-out sets at step 0, unless skipped; all there is with ``--num-rollout 0``."""
        options = self.config.eval
        if options.eval_interval is None or self.first_step != 0:
            return
        if self.num_rollout == 0 or not options.skip_eval_before_train:
            self.evaluate(0, before_training=True)

    def eval_due(self, step: int) -> bool:
        """Whether the held-out sets are scored after ``step``."""
        return should_run_periodic_action(step, self.config.eval.eval_interval, self._per_epoch)

    def evaluate(self, step: int, *, before_training: bool = False) -> dict[str, float]:
        """Score the held-out sets with the engines' current weights."""
        if self._engines is None:
            return {}
        self._to_engines()
        if not before_training:
            self._report(step)
        metrics, plugin_rows = self._handle.evaluate(step)
        for row, step_key in plugin_rows:
            self.reporter.tracking.log(row, step_key)
        if metrics:
            self.reporter.evaluation(step, metrics, before_training=before_training)
        self._step_started = time.monotonic()
        return metrics

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint is written after ``step``; always after the last."""
        interval = self.config.checkpoint.save_interval
        if self._group is None or self.config.checkpoint.save is None:
            return False
        if interval is None:
            return step == self.num_rollout - 1
        return should_run_periodic_action(step, interval, self._per_epoch, self.num_rollout)

    def save(self, step: int) -> None:
        """Write the checkpoint of ``step``, which was trained last, and the HF export if asked for."""
        started = time.monotonic()
        report = self.trainer.last_trained
        assert report is not None
        assert report.rollout_id == step, f"rollout {report.rollout_id} was trained last, not {step}"
        self._turns.wake_trainer()
        self._write_checkpoint(report)
        checkpoint = self.config.checkpoint
        if self._group is not None and checkpoint.save_hf:
            self._group.save_hf(checkpoint.save_hf.format(rollout_id=step))
        self.reporter.add(step, {"perf/save_model_time": time.monotonic() - started})

    def _write_checkpoint(self, report: RolloutReport, timeout_seconds: float | None = None) -> None:
        """The checkpoint counts as complete with the trainer's part, so that goes last."""
        assert self._group is not None
        assert self.config.checkpoint.save is not None
        self.finish_save(timeout_seconds)
        if report.data_state is not None:
            write_data_state(Path(self.config.checkpoint.save), report.rollout_id, report.data_state)
        self._saving = report.rollout_id
        self._group.save(report.rollout_id, timeout_seconds)
        self._saving = None
        self._trainer_saved(report.rollout_id)

    def _trainer_saved(self, step: int) -> None:
        """The trainer's ``save`` returned: the checkpoint is complete, or in the background."""
        if self.config.checkpoint.async_save:
            self._in_background = step
        else:
            self._complete(step)

    def _complete(self, step: int) -> None:
        assert self.config.checkpoint.save is not None
        self._last_saved = step
        prune_data_states(Path(self.config.checkpoint.save), self.config.checkpoint.keep_checkpoints, newest=step)

    def _note_background_save(self) -> None:
        """Take in what the trainer says of a save that it brought to an end while it went on."""
        step = self._in_background
        if self._group is not None and step is not None and self._group.last_complete_save() == step:
            self._in_background = None
            self._complete(step)

    def finish_save(self, timeout_seconds: float | None = None) -> None:
        """Wait for a checkpoint that is written in the background, if one is.

        Args:
            timeout_seconds: The bound; ``--save-timeout-seconds`` unless given.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._group is None or self._in_background is None:
            return
        self._group.finish_save(timeout_seconds)
        self._note_background_save()
        self._in_background = None  # one that failed is over as well

    def save_before_exit(self, timeout_seconds: float) -> None:
        """Save what was trained since the last checkpoint; for a run that is told to end.

        A Hugging Face export is left out: it can be made from the checkpoint.

        Args:
            timeout_seconds: Bound on all of it, with a training step in progress, which is finished first.
        """
        if self._group is None or self.config.checkpoint.save is None:
            return
        deadline = time.monotonic() + timeout_seconds
        report = self.trainer.in_progress or self.trainer.last_trained
        if report is None:
            return
        self._group.wait_idle(timeout_seconds)
        if self._saving is not None:  # the interrupted call was this save, and it has ended now
            self._trainer_saved(self._saving)
            self._saving = None
        self.finish_save(deadline - time.monotonic())
        if report.rollout_id == self._last_saved:
            return
        if self._engines is not None and not self._turns.trainer_awake:
            if self._recovery is not None:
                self._recovery.close()  # or it starts them again
            self._engines.close(_ENGINES_END_SECONDS)  # busy with a rollout nobody will train, on the trainer's devices
        self._turns.wake_trainer(deadline - time.monotonic())
        self._write_checkpoint(report, deadline - time.monotonic())
        self.finish_save(deadline - time.monotonic())
        logger.info("saved the checkpoint of rollout %d before ending", report.rollout_id)

    def rollouts_ahead(self) -> AsyncRollouts[GeneratedRollout]:
        """Rollouts generated ahead of training, at most ``--async-buffer-size`` of them."""
        self.reporter.generated_ahead = True
        return AsyncRollouts(
            self.rollout.generate,
            first_step=self.first_step,
            num_rollout=self.num_rollout,
            buffer_size=self.config.rollout.async_buffer_size,
            timeout_seconds=self.config.cluster.rollout_timeout_seconds,
            syncs_inside=self.config.weights.update_weights_during_rollout,
        )

    def summary(self) -> str:
        """Scores before and after, and where everything was written."""
        checkpoint = self.config.checkpoint
        last = self._last_saved
        hf = checkpoint.save_hf
        paths = {
            "metrics": self.run_dir / "metrics.jsonl",
            "TensorBoard": self.reporter.tracking.options.tensorboard_dir,
            "reward curve": self.reporter.draw_rewards(self.run_dir / "reward.png"),
            "checkpoint": Path(checkpoint.save) / f"iter_{last:07d}" if checkpoint.save and last is not None else None,
            "HF model": Path(hf.format(rollout_id=last)) if hf and last is not None else None,
        }
        if self._recovery is not None and (restarts := self._recovery.summary()) is not None:
            logger.warning("%s", restarts)
        return self.reporter.summary(paths)

    def _report(self, step: int) -> None:
        now = time.monotonic()
        seconds, self._step_started = now - self._step_started, now
        record = self.reporter.pending(step)
        if record:
            train = record.get("perf/train_time", 0.0)
            samples = record.get("rollout/num_samples", 0.0)
            self.reporter.add(
                step,
                {
                    "perf/step_time": seconds,
                    "perf/wait_time_ratio": max(0.0, 1.0 - train / seconds) if seconds else 0.0,
                    "perf/samples_per_sec": samples / seconds if seconds else 0.0,
                },
            )
        self.reporter.finish(step)

    def _to_engines(self) -> None:
        """Engines hold the devices, and their health is asked for."""
        self._turns.to_engines()
        if self._recovery is not None:
            self._recovery.watch()

    def _meet(self) -> None:
        """Engines, those included that died and were replaced, and trainer are ready for a weight sync."""
        self._settle()
        self._turns.meet()

    def _settle(self) -> None:
        """Have everything replaced that died, before the engines change state."""
        if self._recovery is None:
            return
        if self._recovery.look():
            self._turns.make_room()
        self._recovery.settle()
