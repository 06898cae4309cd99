"""The training processes of a run.

Owns one actor per rank (``trainer_actor``), their rendezvous, and the meaning of their failures: a rank that raises or
dies ends the wait for all ranks at once. Tests hold: a dead rank is named with the end of its log, and no call waits
without a bound.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from slime.cluster import waits
from slime.cluster.actor import ActorSetting
from slime.cluster.placement import TRAINER_SHARE, Placement
from slime.cluster.trainer_actor import WORKER_PATH, TrainerActor
from slime.config import Config
from slime.errors import SlimeError, TrainerError
from slime.observability.watchdog import expired
from slime.weights.endpoint import EngineEndpoint
from slime.weights.nccl import nccl_environment

logger = logging.getLogger(__name__)


class TrainerGroup:
    """All ranks as one; every method is a bounded collective call."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        log_dir: Path,
        *,
        board: Any = None,
        name: str = "trainer",
        worker_path: str = WORKER_PATH,
    ) -> None:
        """Start one process per trainer slot; they do nothing until ``init``.

        Args:
            config: Counts, limits and the environment of training processes.
            placement: Reserved slots.
            log_dir: Where each rank writes ``{name}_{rank}.log``.
            board: Actor that rank 0 tells its progress.
            name: What the ranks are called in messages.
            worker_path: ``module:class`` of the worker.
        """
        self._config = config
        self._name = name
        slots = placement.layout.trainer
        self.world_size = len(slots)
        self._settings = [ActorSetting.of(f"{name} {rank}", log_dir) for rank in range(self.world_size)]
        ranks_on_node = Counter(placement.slots[slot].node_id for slot in slots)
        cores = {node["NodeID"]: _cores(node) for node in ray.nodes() if node["Alive"]}
        self._threads = [
            threads_per_process(cores[placement.slots[slot].node_id], ranks_on_node[placement.slots[slot].node_id])
            for slot in slots
        ]
        actor_class = ray.remote(TrainerActor)
        environment = nccl_environment(config) | {k: str(v) for k, v in config.train.train_env_vars.items()}
        self._actors = [
            actor_class.options(
                **placement.options(slot, TRAINER_SHARE),
                runtime_env={"env_vars": {**environment, "OMP_NUM_THREADS": str(threads)}},
            ).remote(setting, worker_path, board if rank == 0 else None)
            for rank, (slot, threads, setting) in enumerate(zip(slots, self._threads, self._settings, strict=True))
        ]
        self._processes: list[waits.Process] = []
        self._in_flight: list[Any] = []
        self._closed = False

    def init(self, config: Config | None = None) -> int:
        """Meet, build and load the model on every rank.

        Args:
            config: The configuration to train with, when it was completed after the processes
                were started.

        Returns:
            First rollout id, on which all ranks agree.

        Raises:
            TrainerError: A rank failed or died, or the ranks disagree.
        """
        return self.finish_init(self.begin_init(config or self._config))

    def begin_init(self, config: Config) -> list[Any]:
        """Let every rank begin ``init``; references for ``finish_init``."""
        self._config = config
        limit = config.cluster.trainer_start_timeout_seconds
        addresses = self._wait([a.address.remote() for a in self._actors], "start", limit)
        self._processes = [address.process for address in addresses]
        first = addresses[0]
        config_ref = ray.put(config)
        return [
            actor.start.remote(config_ref, rank, self.world_size, first.host, first.port, threads)
            for rank, (actor, threads) in enumerate(zip(self._actors, self._threads, strict=True))
        ]

    def finish_init(self, refs: list[Any]) -> int:
        """Wait for ``begin_init``; see ``init``."""
        first_ids = self._wait(refs, "load the model", self._config.cluster.trainer_start_timeout_seconds)
        if len(set(first_ids)) != 1:
            raise TrainerError(f"ranks loaded different iterations: first rollout ids {first_ids}")
        return int(first_ids[0])

    def train(self, batch: Any, rollout_id: int) -> dict[str, float]:
        """Train one rollout.

        Args:
            batch: Reference to the ``RolloutBatch``; each rank fetches it from the object store.
            rollout_id: Its number.
        """
        return self._metrics(self.finish(self.begin("train", batch), f"train rollout {rollout_id}"))

    @staticmethod
    def share(value: Any) -> Any:
        """Put an argument for all ranks into the object store once; the reference stands for it in ``begin``."""
        return ray.put(value)

    def begin(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's worker; references for ``finish``."""
        return [actor.call.remote(method, *args) for actor in self._actors]

    def finish(self, refs: list[Any], doing: str, timeout_seconds: float | None = None) -> list[Any]:
        """Results of ``begin`` by rank; the bound is ``--train-step-timeout-seconds`` unless given."""
        limit = self._config.cluster.train_step_timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._wait(refs, doing, limit)

    def read(self, attribute: str, timeout_seconds: float | None = None) -> list[Any]:
        """An attribute of every rank's worker."""
        doing = f"tell its {attribute.replace('_', ' ')}"
        return self.finish([actor.read.remote(attribute) for actor in self._actors], doing, timeout_seconds)

    def step_metrics(self) -> list[dict[str, float]]:
        """``train/*`` of each optimizer step of the last rollout, from rank 0."""
        limit = self._config.cluster.train_step_timeout_seconds
        return self._wait([self._actors[0].read.remote("step_metrics")], "tell its metrics", limit)[0]

    def save(self, rollout_id: int, timeout_seconds: float | None = None) -> None:
        """Write the checkpoint of ``rollout_id``; the bound is ``--save-timeout-seconds`` unless given.

        With ``--async-save`` it is complete later: see ``finish_save`` and ``last_complete_save``.
        """
        limit = self._config.cluster.save_timeout_seconds if timeout_seconds is None else timeout_seconds
        self._call_all("save", rollout_id, limit=limit)

    def finish_save(self, timeout_seconds: float | None = None) -> None:
        """Wait for a checkpoint written in the background; the bound is as that of ``save``."""
        limit = self._config.cluster.save_timeout_seconds if timeout_seconds is None else timeout_seconds
        self._call_all("finish_save", limit=limit)

    def last_complete_save(self) -> int | None:
        """Rollout id of the newest checkpoint that the ranks completed."""
        limit = self._config.cluster.train_step_timeout_seconds
        return self._wait([self._actors[0].read.remote("last_complete_save")], "tell its last save", limit)[0]

    def save_hf(self, path: str) -> None:
        """Export Hugging Face weights to ``path``."""
        self._call_all("save_hf", path, limit=self._config.cluster.save_timeout_seconds)

    def connect_engines(self, endpoints: Sequence[EngineEndpoint], check: Callable[[], None] | None = None) -> None:
        """Tell the ranks which engines get the weights; ``check`` raises when one is gone."""
        limit = self._config.weights.weight_sync_timeout_seconds
        self._call_all("connect_engines", list(endpoints), limit=limit, check=check)

    def update_weights(self, check: Callable[[], None] | None = None) -> dict[str, float]:
        """Bring every engine to the trainer's weights; ``check`` raises when an engine is gone."""
        limit = self._config.weights.weight_sync_timeout_seconds
        return self._metrics(self._call_all("update_weights", limit=limit, check=check))

    def weight_version(self) -> int:
        """Version given to the engines last; all ranks agree on it."""
        versions = self.read("weight_version")
        if len(set(versions)) != 1:
            raise TrainerError(f"ranks disagree on the weight version: {versions}")
        return int(versions[0])

    def sleep(self) -> None:
        """Move the training state off the devices."""
        self._call_all("sleep", limit=self._config.cluster.train_step_timeout_seconds)

    def hold_parameters(self) -> None:
        """Have the parameters on the devices and nothing else of the training state."""
        self._call_all("hold_parameters", limit=self._config.cluster.train_step_timeout_seconds)

    def device_memory(self) -> dict[str, float]:
        """Bytes in use on the device of rank 0; empty on a CPU."""
        limit = self._config.cluster.train_step_timeout_seconds
        return self._wait([self._actors[0].read.remote("device_memory")], "tell its device memory", limit)[0]

    def wake_up(self, timeout_seconds: float | None = None) -> None:
        """Bring the training state back; the bound is ``--train-step-timeout-seconds`` unless given."""
        limit = self._config.cluster.train_step_timeout_seconds if timeout_seconds is None else timeout_seconds
        self._call_all("wake_up", limit=limit)

    def wait_idle(self, timeout_seconds: float) -> None:
        """Wait for calls that were interrupted in the driver but still run in the ranks."""
        self._wait(self._in_flight, "finish the call in progress", timeout_seconds)

    def drain(self, timeout_seconds: float) -> None:
        """Wait until a call that failed on one rank has ended on all of them, whatever came of it."""
        refs, self._in_flight = self._in_flight, []
        if refs and ray.wait(refs, num_returns=len(refs), timeout=timeout_seconds)[1]:
            raise expired(
                waiter="the driver", waited_for=f"{self._name} to end a call", timeout_seconds=timeout_seconds
            )

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all ranks: orderly where possible within the time, by force otherwise."""
        if self._closed:
            return
        self._closed = True
        refs = [actor.call.remote("close") for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=timeout_seconds)
        for actor in self._actors:
            ray.kill(actor)

    def _call_all(self, method: str, *args: Any, limit: float, check: Callable[[], None] | None = None) -> list[Any]:
        return self._wait(self.begin(method, *args), method.replace("_", " "), limit, check)

    def _wait(self, refs: list[Any], doing: str, limit: float, check: Callable[[], None] | None = None) -> list[Any]:
        self._in_flight = refs
        try:
            values = waits.get_all(
                refs,
                waited_for=[f"{self._name} rank {rank} to {doing}" for rank in range(len(refs))],
                timeout_seconds=limit,
                check=check,
                on_death=self._death,
                on_timeout=self._stuck,
            )
        except TrainerError as error:
            stopped = self._stopped()  # what the others report is then only the consequence
            if not stopped:
                raise
            raise TrainerError(f"{error}\n{stopped}") from None
        self._in_flight = []
        return values

    def _death(self, rank: int) -> SlimeError:
        return TrainerError(f"{self._name} rank {rank} of {self.world_size} died; {self._settings[rank].log_tail()}")

    def _stuck(self, ranks: list[int]) -> str:
        stuck = {rank: self._processes[rank] for rank in ranks if rank < len(self._processes)}
        asked = waits.request_stacks(list(stuck.values()))
        lines = [
            f"stacks of rank {rank} are in {self._settings[rank].log_path}"
            if process in asked
            else f"rank {rank} is process {process.pid} of node {process.node_id}; kill -{waits.STACK_SIGNAL.name} "
            f"{process.pid} there writes its stacks into {self._settings[rank].log_path}"
            for rank, process in stuck.items()
        ]
        return "\n".join(filter(None, [self._stopped(), *lines]))

    def _stopped(self) -> str:
        """Which ranks were stopped by a signal, of those on this node."""
        return "\n".join(
            f"{self._name} rank {rank} is stopped; kill -CONT {process.pid} lets it go on"
            for rank, process in enumerate(self._processes)
            if waits.is_stopped(process)
        )

    @staticmethod
    def _metrics(rows: list[Any]) -> dict[str, float]:
        return next((dict(row) for row in rows if row), {})


def threads_per_process(cores: int, processes: int) -> int:
    """Intra-op threads of each of ``processes`` that share ``cores``; at least 1."""
    return max(1, cores // max(1, processes))


def _cores(node: dict[str, Any]) -> int:
    """Cores of a node: of this machine as the scheduler grants them, of others as Ray counted them."""
    if node["NodeManagerAddress"] == ray.util.get_node_ip_address():
        limit = os.environ.get("OMP_NUM_THREADS", "")
        own = len(os.sched_getaffinity(0))
        return min(own, int(limit)) if limit.isdigit() and int(limit) > 0 else own
    return int(node["Resources"].get("CPU", 1))
