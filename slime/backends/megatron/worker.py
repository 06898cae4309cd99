"""One training rank's life: start, load, train rollouts, hand weights to the engines, save, end.

Owns the order of things and the state that outlives a rollout; every step itself is elsewhere. A plain
class, so that a test, a Ray actor or a script can hold it. All methods are collective over the training
ranks unless they say otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from slime.backends.megatron import cpu

cpu.install()  # before the first import of megatron

from slime.backends.megatron import parallel as parallel_groups  # noqa: E402
from slime.backends.megatron.checkpoint import Trainable, load_weights, resume, resume_snapshots  # noqa: E402
from slime.backends.megatron.checkpoint_dirs import StartPoint, reference_point, start_point, teacher_point  # noqa: E402
from slime.backends.megatron.checkpoint_saver import CheckpointSaver  # noqa: E402
from slime.backends.megatron.device_state import DeviceState, Part, device_memory  # noqa: E402
from slime.backends.megatron.export import iter_hf_buckets, save_hf  # noqa: E402
from slime.backends.megatron.hooks import TrainHooks, load_hooks  # noqa: E402
from slime.backends.megatron.model import build_model, build_optimizer  # noqa: E402
from slime.backends.megatron.passes import ModelPasses, ScoreSettings  # noqa: E402
from slime.backends.megatron.routing_replay import routing_replay  # noqa: E402
from slime.backends.megatron.scoring import plan_passes  # noqa: E402
from slime.backends.megatron.snapshots import WeightSnapshot  # noqa: E402
from slime.backends.megatron.step import TrainStep  # noqa: E402
from slime.backends.megatron.train_rollout import RolloutTrainer  # noqa: E402
from slime.config import Config  # noqa: E402
from slime.data.columns import with_rows  # noqa: E402
from slime.errors import ConfigError  # noqa: E402
from slime.observability.staleness import compute_staleness  # noqa: E402
from slime.observability.timers import Timer  # noqa: E402
from slime.types import Float32Array, RolloutBatch  # noqa: E402
from slime.weights.endpoint import EngineEndpoint  # noqa: E402
from slime.weights.updater import TrainerRank, WeightUpdater, build_updater  # noqa: E402

logger = logging.getLogger(__name__)


class MegatronWorker:
    """One rank.

    Args:
        config: The resolved configuration.
        rank: This process, from 0.
        world_size: Number of training processes.
        master_addr: Host of rank 0.
        master_port: Port of rank 0's store.
        num_threads: Intra-op threads of this process; None leaves torch's setting alone.
        moves_memory: Whether ``sleep`` moves anything; None: on CUDA, since a CPU has no other memory.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        *,
        num_threads: int | None = None,
        moves_memory: bool | None = None,
    ) -> None:
        self.config = config
        self.weight_version = 0
        self.on_progress: Callable[[str, int, int], None] | None = None  # see ModelPasses; set it before init
        self._place = {"rank": rank, "world_size": world_size, "master_addr": master_addr, "master_port": master_port}
        self._timer = Timer()
        self._has_engines = False
        self._weights_changed = True  # since the last update_weights; loaded weights are news to an engine
        self._rotated = False  # whether the snapshots of --keep-old-actor know the newest weights
        self._updater: WeightUpdater | None = None
        self._saver: CheckpointSaver | None = None
        self._moves_memory = config.cluster.device == "cuda" if moves_memory is None else moves_memory
        self._closed = False
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def init(self) -> int:
        """Join the other ranks, build the model and load its weights.

        Returns:
            First rollout id to train: one after the resumed checkpoint's, else 0.

        Raises:
            CheckpointError: There is nothing to load, or it does not fit.
            WaitTimeoutError: Other ranks did not arrive.
        """
        config = self.config
        self.parallel = parallel_groups.initialize(config, **self._place)
        self.hooks: TrainHooks = load_hooks(config)
        if self.hooks.megatron_init:
            self.hooks.megatron_init(self.hooks.args)
        start = start_point(config)
        self.chunks = build_model(config, parallel=self.parallel)
        loaded = self._load_references(start)
        optimizer, scheduler = build_optimizer(config, self.chunks)
        self._trainable = Trainable(self.chunks, optimizer, scheduler)
        if start.resume:
            resume(self._trainable, config, self.parallel, start)
        elif start != loaded:
            load_weights(self._trainable, config, self.parallel, start)
        self._device_state = DeviceState(self.chunks, optimizer, self.parallel.device)
        self._trainer = self._build_trainer()
        self._trainable.snapshots = self._moving_snapshots()
        if start.resume and self._trainable.snapshots:
            resume_snapshots(self._trainable, self.parallel, start)
            # A checkpoint may be from after the hand-over to the engines, which a resumed run repeats.
            self._rotated = self._old_actor is not None and self._rollout_actor.equals(self.chunks)
        if config.checkpoint.save is not None:
            self._saver = CheckpointSaver(self._trainable, config, self.parallel, Path(config.checkpoint.save))
        if config.checkpoint.start_rollout_id is not None:
            return config.checkpoint.start_rollout_id
        return start.iteration + 1 if start.resume and start.iteration is not None else 0

    def train(self, batch: RolloutBatch, values: dict[int, Float32Array] | None = None) -> dict[str, float]:
        """Train one rollout: score, estimate advantages, all optimizer steps.

        Args:
            batch: The whole rollout; every rank gets the same and takes its share.
            values: A critic's values, sample by sample.

        Returns:
            ``train/*`` of all optimizer steps together, ``rollout/*`` and ``perf/*``; equal on every rank
            except ``perf/*``, which is this rank's.

        Raises:
            CheckpointError: A checkpoint written in the background failed.
        """
        self._complete_written_save()
        metrics = self._trainer.train(_with_values(batch, values))
        self._weights_changed, self._rotated = True, False
        interval = self.config.algorithm.ref_update_interval
        if self._reference is not None and interval and (batch.rollout_id + 1) % interval == 0:
            self._reference.update(self.chunks)
        metrics |= compute_staleness(batch.weight_versions, batch.weight_version_spans, self.weight_version)
        metrics |= self._timer.perf_metrics()
        self._timer.reset()
        return metrics

    def estimate(self, batch: RolloutBatch, values: dict[int, Float32Array]) -> dict[str, float]:
        """Find the returns of a rollout that only the critic is trained on; the weights stay.

        Returns:
            ``rollout/*`` and ``perf/*``.

        Raises:
            CheckpointError: A checkpoint written in the background failed.
        """
        self._complete_written_save()
        metrics = self._trainer.estimate(_with_values(batch, values)) | self._timer.perf_metrics()
        self._timer.reset()
        return metrics

    @property
    def returns(self) -> dict[int, Float32Array]:
        """Returns of the last rollout, sample by sample; each sample from one rank only. Not collective."""
        return self._trainer.returns

    @property
    def step_metrics(self) -> list[dict[str, float]]:
        """``train/*`` of each optimizer step of the last rollout, with ``train/step``."""
        return self._trainer.step_metrics

    def save(self, rollout_id: int) -> None:
        """Write ``{save}/iter_{rollout_id:07d}``; it appears whole or not at all.

        With ``--async-save`` the files are written while training goes on; the checkpoint is completed by
        the first ``train`` after that, by the next ``save`` or by ``finish_save``.

        Raises:
            ConfigError: Without ``--save``.
            CheckpointError: Writing failed.
        """
        if self._saver is None:
            raise ConfigError("saving a checkpoint needs --save")
        with self._timer.context("save_model"):
            self._saver.save(rollout_id)

    def finish_save(self) -> None:
        """Wait for a checkpoint that is written in the background, and complete it.

        Raises:
            CheckpointError: Writing failed.
        """
        if self._saver is not None:
            self._saver.finish()

    @property
    def last_complete_save(self) -> int | None:
        """Rollout id of the newest checkpoint that this worker completed. Not collective."""
        return None if self._saver is None else self._saver.last_complete

    def save_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face directory."""
        with self._timer.context("save_model"):
            save_hf(self.chunks, self.config, path)

    def connect_engines(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Name the engines that get the weights from now on; none ends the hand-over."""
        if self._updater is None:
            place = TrainerRank(rank=self.parallel.rank, world_size=self.parallel.world_size)
            self._updater = build_updater(self.config, place)
        self._updater.connect(endpoints)
        self._has_engines = bool(endpoints)

    def update_weights(self) -> dict[str, float]:
        """Bring every connected engine to this model's weights, checked by checksum.

        The version goes up unless nothing was trained since the last call (``--num-critic-only-steps``).

        Returns:
            ``perf/update_weights_*``; on rank 0 only.

        Raises:
            WeightSyncError: An engine holds something else afterwards.
        """
        version = self.weight_version + self._weights_changed
        metrics: dict[str, float] = {}
        if self._has_engines and self._updater is not None:
            size, receivers = self.config.weights.update_weight_buffer_size, self._updater.receivers
            buckets = iter_hf_buckets(self.chunks, self.config, size, receivers)
            report = self._updater.update(buckets, str(version))
            if self.parallel.rank == 0:
                metrics["perf/update_weights_time"] = report.seconds
                metrics["perf/update_weights_wire_bytes"] = float(report.bytes)
                metrics |= report.metrics
        self.weight_version = version
        if self._weights_changed:
            self._rotate_old_actor()
        self._weights_changed = False
        return metrics

    def continue_version(self, version: int, weights_changed: bool) -> None:
        """Go on from the version that the engines have. Not collective.

        Args:
            version: The engines' version.
            weights_changed: Whether the loaded weights are newer.
        """
        self.weight_version = version
        self._weights_changed = weights_changed

    def sleep(self) -> None:
        """Leave the device to the engines. Until the next ``wake_up`` or ``hold_parameters`` nothing else works."""
        self._keep("sleep")

    def hold_parameters(self) -> None:
        """Have nothing but the parameters on the device: enough to hand them to the engines or to export them."""
        self._keep("hold_parameters", Part.PARAMETERS)

    def wake_up(self) -> None:
        """Come back with everything."""
        self._keep("wake_up", *Part)

    @property
    def device_memory(self) -> dict[str, float]:
        """Bytes in use on the device by all processes, and by this one's tensors; empty on a CPU. Not collective."""
        return device_memory(self.parallel.device)

    def _keep(self, name: str, *parts: Part) -> None:
        with self._timer.context(name):
            if self._moves_memory:
                self._device_state.keep(*parts)

    def close(self) -> None:
        """Leave the process groups. A second call does nothing."""
        if not self._closed:
            self._closed = True
            if self._updater is not None:
                self._updater.close()
            parallel_groups.destroy()

    def _complete_written_save(self) -> None:
        """Complete a checkpoint that was written in the background, if all ranks are ready."""
        if self._saver is not None:
            self._saver.poll()

    def _load_references(self, start: StartPoint) -> StartPoint | None:
        """Keep copies of the reference's and the teacher's weights if anything needs them.

        Returns:
            What is in the model then.
        """
        self._reference: WeightSnapshot | None = None
        self._teacher: WeightSnapshot | None = None
        self._old_actor: WeightSnapshot | None = None
        needed = plan_passes(self.config, num_steps=self.config.num_steps_per_rollout)
        loaded: StartPoint | None = None
        if needed.teacher:
            loaded = teacher_point(self.config)
            self._teacher = self._snapshot_of(loaded)
        if needed.ref:
            loaded = reference_point(self.config)
            self._reference = self._snapshot_of(loaded)
        return loaded

    def _moving_snapshots(self) -> dict[str, WeightSnapshot]:
        """The snapshots that training changes, by their names in a checkpoint."""
        snapshots: dict[str, WeightSnapshot] = {}
        if self._reference is not None and self.config.algorithm.ref_update_interval:
            snapshots["reference"] = self._reference
        if self._old_actor is not None:
            snapshots |= {"old_actor": self._old_actor, "rollout_actor": self._rollout_actor}
        return snapshots

    def _snapshot_of(self, point: StartPoint) -> WeightSnapshot:
        load_weights(Trainable(self.chunks), self.config, self.parallel, point)
        return WeightSnapshot(self.chunks)

    def _build_step(self) -> tuple[ModelPasses, TrainStep]:
        config = self.config
        settings = ScoreSettings(
            vocab_size=config.megatron.vocab_size,
            temperature=config.rollout.rollout_temperature,
            chunk_size=config.train.log_probs_chunk_size,
            recompute=config.train.recompute_loss_function,
            half=config.train.precision != "fp32",
        )
        passes = ModelPasses(self.chunks, self.parallel, settings, routing_replay(config, self.chunks, self.parallel))
        passes.on_progress = self.on_progress
        return passes, TrainStep(passes, self._trainable.optimizer, self._trainable.scheduler)

    def _build_trainer(self) -> RolloutTrainer:
        passes, step = self._build_step()
        if self.config.rollout.keep_old_actor:
            self._old_actor = WeightSnapshot(self.chunks)
            self._rollout_actor = self._old_actor.clone()
        return RolloutTrainer(
            self.config,
            passes,
            step,
            self.hooks,
            self._timer,
            reference=self._reference,
            teacher=self._teacher,
            old_actor=self._old_actor,
        )

    def _rotate_old_actor(self) -> None:
        """Follow the weights that generate: with an interval of 1 the next rollout may still use the ones before."""
        if self._old_actor is None or self._rotated:
            return
        self._rotated = True
        if self.config.weights.update_weights_interval == 1:
            self._old_actor.copy_from(self._rollout_actor)
            self._rollout_actor.update(self.chunks)
        else:
            self._old_actor.update(self.chunks)


def _with_values(batch: RolloutBatch, values: dict[int, Float32Array] | None) -> RolloutBatch:
    return batch if values is None else with_rows(batch, values=values)
