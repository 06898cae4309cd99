"""A trainer whose processes end while engines generate: ``--release-train``.

Owns when they are started and ended, and what outlives them in the driver: the weight version, whether there are newer
weights, and the engines that are connected. Everything else they find in the checkpoint that was written before they
ended. Tests hold: losses are those of a run whose processes stay; no two weights get the same version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slime.cluster.trainer import TrainerGroup
from slime.config import Config
from slime.errors import TrainerError
from slime.weights.endpoint import EngineEndpoint

logger = logging.getLogger(__name__)

_END_SECONDS = 30.0


class ReleasedTrainer:
    """The methods of ``TrainerGroup``; ``sleep`` ends the processes, ``wake_up`` starts new ones.

    Args:
        start: Starts the processes of a group.
    """

    def __init__(self, start: Callable[[], TrainerGroup]) -> None:
        self._start = start
        self._group: TrainerGroup | None = start()
        self._config: Config | None = None
        self._trained: int | None = None
        self._saved: int | None = None
        self._version: int | None = None
        self._news = True  # whether the engines lack the newest weights
        self._endpoints: tuple[EngineEndpoint, ...] = ()
        self._connected = False

    def init(self, config: Config) -> int:
        """Meet, build and load the model on every rank; the first rollout id."""
        self._config = config
        return self._running.init(config)

    @property
    def _running(self) -> TrainerGroup:
        """The processes.

        Raises:
            TrainerError: They have been ended, and nothing has started them again.
        """
        if self._group is None:
            raise TrainerError("the training processes are not running: --release-train ended them for the rollout")
        return self._group

    def train(self, batch: Any, rollout_id: int) -> dict[str, float]:
        """Train one rollout."""
        metrics = self._running.train(batch, rollout_id)
        self._trained, self._news = rollout_id, True
        return metrics

    def step_metrics(self) -> list[dict[str, float]]:
        """``train/*`` of each optimizer step of the last rollout."""
        return self._running.step_metrics()

    def save(self, rollout_id: int, timeout_seconds: float | None = None) -> None:
        """Write the checkpoint of ``rollout_id``."""
        self._running.save(rollout_id, timeout_seconds)
        self._saved = rollout_id

    def finish_save(self, timeout_seconds: float | None = None) -> None:
        """Wait for a checkpoint written in the background; one of processes that have ended is complete."""
        if self._group is not None:
            self._group.finish_save(timeout_seconds)

    def last_complete_save(self) -> int | None:
        """Rollout id of the newest complete checkpoint."""
        return self._saved if self._group is None else self._group.last_complete_save()

    def save_hf(self, path: str) -> None:
        """Export Hugging Face weights to ``path``."""
        self._running.save_hf(path)

    def connect_engines(self, endpoints: Sequence[EngineEndpoint], check: Callable[[], None] | None = None) -> None:
        """Tell the ranks which engines get the weights, also those that are started later."""
        self._endpoints = tuple(endpoints)
        self._running.connect_engines(endpoints, check)
        self._connected = True

    def update_weights(self, check: Callable[[], None] | None = None) -> dict[str, float]:
        """Bring every engine to the trainer's weights."""
        if not self._connected:
            self.connect_engines(self._endpoints, check)
        metrics = self._running.update_weights(check)
        self._version, self._news = self._running.weight_version(), False
        return metrics

    def drain(self, timeout_seconds: float) -> None:
        """Wait until a call that failed on one rank has ended on all of them."""
        self._running.drain(timeout_seconds)

    def weight_version(self) -> int:
        """Version given to the engines last."""
        return self._running.weight_version() if self._version is None else self._version

    def sleep(self) -> None:
        """End the processes.

        Raises:
            TrainerError: They were trained and not saved: the training would be lost.
        """
        if self._group is None:
            return
        if self._trained is not None and self._saved != self._trained:
            raise TrainerError(f"rollout {self._trained} was trained and not saved: --release-train cannot end it")
        self._group.finish_save()
        self._group.close(_END_SECONDS)
        self._group = None
        logger.info("ended the training processes for the rollout")

    def hold_parameters(self) -> None:
        """Have the processes running."""
        self.wake_up()

    def wake_up(self, timeout_seconds: float | None = None) -> None:
        """Start processes that continue where those before ended.

        Args:
            timeout_seconds: Unused: the bound is ``--trainer-start-timeout-seconds``.
        """
        if self._group is not None:
            return
        assert self._config is not None, "initialised"
        self._group = self._start()
        config = self._config if self._saved is None else _continued(self._config)
        first = self._group.init(config)
        if self._saved is not None and first != self._saved + 1:
            raise TrainerError(
                f"the checkpoint of rollout {self._saved} was to be continued, found that of {first - 1}"
            )
        if self._version is not None:
            told = self._group.begin("continue_version", self._version, self._news)
            self._group.finish(told, "take over the weight version")
        self._connected = False  # when the next weights are sent: until then engines may be replaced

    def device_memory(self) -> dict[str, float]:
        """Bytes in use on the device of the first rank; empty without processes."""
        return {} if self._group is None else self._group.device_memory()

    def wait_idle(self, timeout_seconds: float) -> None:
        """Wait for calls that were interrupted in the driver."""
        if self._group is not None:
            self._group.wait_idle(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all ranks."""
        if self._group is not None:
            self._group.close(timeout_seconds)


def _continued(config: Config) -> Config:
    """The configuration that loads the newest checkpoint of this run."""
    checkpoint = replace(
        config.checkpoint, load=config.checkpoint.save, ckpt_step=None, resume=True, start_rollout_id=None
    )
    values = {**config.megatron.values, "no_load_optim": False, "no_load_rng": False}  # meant for the first start
    return replace(config, checkpoint=checkpoint, megatron=replace(config.megatron, values=values))
