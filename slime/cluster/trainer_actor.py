"""One training process: what it must be able to do, and the Ray actor that hosts it.

Knows a worker by its path alone, so that the driver imports no training backend. Tests hold: what a worker raises
reaches the driver, and its traceback the process's log.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from slime.cluster import waits
from slime.cluster.actor import ActorSetting, enter
from slime.cluster.ports import free_port
from slime.cluster.progress import ProgressReports
from slime.config import Config
from slime.types import RolloutBatch
from slime.weights.endpoint import EngineEndpoint

logger = logging.getLogger(__name__)

# Below the ports that the system gives to connections: one of those could be taken before rank 0 listens.
TRAINER_PORTS = range(20000, 30000)

WORKER_PATH = "slime.backends.megatron.worker:MegatronWorker"


class Worker(Protocol):
    """One rank's life, without Ray; implemented by the training backend."""

    weight_version: int
    step_metrics: list[dict[str, float]]
    on_progress: Callable[[str, int, int], None] | None

    def init(self) -> int:
        """Join the other ranks, load the model; the first rollout id."""
        ...

    def train(self, batch: RolloutBatch) -> dict[str, float]:
        """Train one rollout; metrics."""
        ...

    @property
    def last_complete_save(self) -> int | None:
        """The newest checkpoint that is complete."""
        ...

    def save(self, rollout_id: int) -> None:
        """Write a checkpoint, or begin to."""
        ...

    def finish_save(self) -> None:
        """Complete a checkpoint that is written in the background."""
        ...

    def save_hf(self, path: str) -> None:
        """Export Hugging Face weights."""
        ...

    def connect_engines(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Say which engines get the weights."""
        ...

    def update_weights(self) -> dict[str, float]:
        """Send the weights; metrics of the transfer."""
        ...

    def sleep(self) -> None:
        """Move the training state off the device."""
        ...

    def hold_parameters(self) -> None:
        """Have the parameters on the device and nothing else."""
        ...

    def wake_up(self) -> None:
        """Bring everything back."""
        ...

    @property
    def device_memory(self) -> dict[str, float]:
        """Bytes in use on the device."""
        ...

    def close(self) -> None:
        """Leave the process groups."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """Where a rank is: a free port of its host, and its process."""

    host: str
    port: int
    process: waits.Process


class TrainerActor:
    """Hosts one rank. Methods are those of ``Worker``, called by name."""

    def __init__(self, setting: ActorSetting, worker_path: str, board: Any = None) -> None:
        """Take what ``start`` needs; ``board`` is the actor that keeps progress, for one rank."""
        enter(setting)
        self._worker_path = worker_path
        self._board = board
        self._worker: Any = None

    def address(self) -> RankAddress:
        """Where this process is, with a free port."""
        return RankAddress(
            host=ray.util.get_node_ip_address(),
            port=free_port(random.choice(TRAINER_PORTS)),
            process=waits.Process(node_id=ray.get_runtime_context().get_node_id(), pid=os.getpid()),
        )

    def start(
        self, config: Config, rank: int, world_size: int, master_addr: str, master_port: int, threads: int
    ) -> int:
        """Build the worker and load the model; returns the first rollout id."""
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(threads)
        module, _, name = self._worker_path.partition(":")
        worker_class = getattr(importlib.import_module(module), name)
        self._worker = worker_class(config, rank, world_size, master_addr, master_port)
        if self._board is not None:
            self._worker.on_progress = ProgressReports(self._board)
        return self._call(self._worker.init)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker."""
        return self._call(getattr(self._worker, method), *args)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception:  # process boundary: the driver shows the cause, the log has the whole story
            logger.info("the call failed", exc_info=True)
            raise

    def read(self, attribute: str) -> Any:
        """An attribute of the worker."""
        return getattr(self._worker, attribute)
