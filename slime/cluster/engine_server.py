"""One engine: its processes, one per node it spans, started, watched and ended together.

Owns placement, addresses and ports of these processes. Tests hold: engines that are started at the same time get
different ports; one whose port was taken in between starts again with others; only the first process serves HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slime.cluster.engine_commands import EngineProcessSetting, engine_command
from slime.cluster.host_pulls import ActorPull
from slime.cluster.hosted_server import HostedServer
from slime.cluster.placement import ENGINE_SHARE, Placement
from slime.cluster.ports import EnginePorts, PortBook
from slime.cluster.registration import Registration
from slime.config import Config
from slime.config.engine_plan import PlannedEngine
from slime.weights.endpoint import EngineEndpoint

logger = logging.getLogger(__name__)


class EngineServer:
    """The driver's side of one engine.

    Args:
        config: Resolved configuration.
        planned: What it is and on which slots.
        placement: The reserved slots.
        ports: Shared by all engines of the run.
        log_dir: Where ``engine_{i}.log`` is written, and ``engine_{i}_node_{r}.log`` for further nodes.
        local: Whether the cluster is this machine alone.
        environment: Added to the environment of its processes.
    """

    def __init__(
        self,
        config: Config,
        planned: PlannedEngine,
        placement: Placement,
        ports: PortBook,
        log_dir: Path,
        *,
        local: bool,
        environment: Mapping[str, str],
    ) -> None:
        self.planned = planned
        self._config = config
        self._placement = placement
        self._port_book = ports
        self._environment = dict(environment)
        self._encoder_urls: tuple[str, ...] = ()
        self._url = ""
        self._bootstrap_port: int | None = None
        # Engines place themselves by GPU id: show them every GPU of the node.
        of_host = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        self.processes = [
            HostedServer(
                planned.name if process.node_rank == 0 else f"{planned.name} node {process.node_rank}",
                placement.options(process.slots[0], ENGINE_SHARE) | {"runtime_env": of_host},
                log_dir,
                local=local,
                timeout_seconds=config.cluster.cluster_start_timeout_seconds,
            )
            for process in planned.processes
        ]

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.planned.name

    @property
    def url(self) -> str:
        """Base address of its HTTP server, known once it was launched."""
        return self._url

    @property
    def ready_url(self) -> str:
        """Answers 200 when the engine is ready."""
        return f"{self.url}/health"

    @property
    def health_url(self) -> str:
        """Answers 200 when the engine can generate."""
        return f"{self.url}/health_generate"

    @property
    def alive_url(self) -> str:
        """Answers 200 also while the engine is paused and gets weights."""
        return f"{self.url}/model_info"

    def begin_hosts(self) -> None:
        """Start the host actors; ``launch`` waits for them."""
        for process in self.processes:
            process.begin_host()

    def launch(self, encoder_urls: Sequence[str] = ()) -> None:
        """Start all processes on fresh ports; returns before the engine is ready.

        Args:
            encoder_urls: Encoder engines that it uses.
        """
        self._encoder_urls = tuple(encoder_urls) or self._encoder_urls
        facts = [process.host() for process in self.processes]
        widths = EnginePorts.widths(int(self._argument("dp_size", 1)))
        ports = [
            EnginePorts.of(self._port_book.take(fact.node_id, widths, lambda s, p=p: p.free_ports(s, widths)))
            for p, fact in zip(self.processes, facts, strict=True)
        ]
        self._url = f"http://{facts[0].address}:{ports[0].server}"
        self._bootstrap_port = ports[0].bootstrap if self.planned.worker_type == "prefill" else None
        for plan, process, fact, own in zip(self.planned.processes, self.processes, facts, ports, strict=True):
            gpu_id = self._placement.slots[plan.slots[0]].gpu_id
            setting = EngineProcessSetting(
                host=fact.address,
                port=own.server,
                nccl_port=own.nccl,
                base_gpu_id=0 if gpu_id is None else fact.local_gpu(gpu_id),
                node_rank=plan.node_rank,
                dist_init_addr=f"{facts[0].address}:{ports[0].dist_init}",
                bootstrap_port=self._bootstrap_port,
                encoder_urls=self._encoder_urls,
            )
            process.launch(engine_command(self._config, self.planned, setting), self._environment)

    def readiness(self, timeout_seconds: float) -> Any:
        """Reference that is there when the engine answers; see ``HostedServer.readiness``."""
        return self.processes[0].readiness(self.ready_url, timeout_seconds)

    def stop(self) -> list[Any]:
        """Begin an orderly end of all processes; references that are there when they have ended."""
        return [ref for process in self.processes if (ref := process.stop()) is not None]

    def kill(self) -> None:
        """End all processes at once."""
        for process in self.processes:
            process.kill()

    def leave(self) -> None:
        """End the host actors."""
        for process in self.processes:
            process.leave()

    @property
    def registration(self) -> Registration:
        """What its router is told."""
        return Registration(url=self.url, worker_type=self.planned.worker_type, bootstrap_port=self._bootstrap_port)

    @property
    def endpoint(self) -> EngineEndpoint:
        """The engine, as those see it who bring weights to it."""
        slots = [self._placement.slots[slot] for slot in self.planned.slots]
        backend: Literal["embedded", "sglang"] = "sglang"
        if self._config.engine.rollout_backend == "embedded":
            backend = "embedded"
        return EngineEndpoint(
            url=self.url,
            name=self.name,
            backend=backend,
            num_gpus=self.planned.num_gpus,
            node_id=slots[0].node_id,
            gpu_ids=tuple(slot.gpu_id for slot in slots if slot.gpu_id is not None),
            trainer_ranks=self.planned.trainer_ranks,
            model_path=self.planned.model_path,
            local_dir=self._config.weights.update_weight_local_checkpoint_dir,
            pull=ActorPull(self.name, tuple(process.actor for process in self.processes)),
        )

    def _argument(self, name: str, default: Any) -> Any:
        return {name: default, **self._config.sglang, **self.planned.overrides}[name]
