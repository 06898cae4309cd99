"""The inference engines of a run and the routers in front of them.

Owns their start, readiness, registration, liveness, memory turns and end, as the plan says; one engine is
``engine_server``'s, one router ``router_server``'s. Requests for samples are not its business. Tests hold: a dead
engine or router raises ``EngineError`` with the end of its log; nothing survives the driver, except engines and
routers that ran before it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from slime import http_control
from slime.cluster import waits
from slime.cluster.engine_commands import engine_environment
from slime.cluster.engine_server import EngineServer
from slime.cluster.external_engines import external_endpoints, external_registrations
from slime.cluster.flush import flush_cache
from slime.cluster.hosted_server import HostedServer, PortTakenError, failures
from slime.cluster.placement import Placement, check_engine_slots
from slime.cluster.ports import PortBook
from slime.cluster.registration import Registration, deregister, register
from slime.cluster.router_server import RouterServer
from slime.cluster.trainer import threads_per_process
from slime.config import Config
from slime.config.engine_plan import EnginePlan, PlannedEngine, plan_engines
from slime.errors import SlimeError
from slime.weights.bracket import release
from slime.weights.endpoint import EngineEndpoint
from slime.weights.nccl import nccl_environment

logger = logging.getLogger(__name__)

_PORT_ATTEMPTS = 3
_EXTERNAL_RELEASE_SECONDS = 1.0  # for each of two requests


class EngineGroup:
    """All engines and routers as one."""

    def __init__(self, config: Config, placement: Placement, log_dir: Path, *, ports: PortBook | None = None) -> None:
        """Prepare; nothing is started yet.

        Args:
            config: Resolved configuration.
            placement: Reserved slots.
            log_dir: Where ``engine_{i}.log`` and ``router.log`` are written.
            ports: Which ports are tried; a fresh book by default.

        Raises:
            ConfigError: The placement cuts an engine in two.
        """
        self._config = config
        self.plan: EnginePlan = plan_engines(config)
        check_engine_slots(self.plan, placement.slots)
        local = len([n for n in ray.nodes() if n["Alive"]]) == 1
        book = ports or PortBook()
        self.servers = [
            EngineServer(config, planned, placement, book, log_dir, local=local, environment=self._environment(planned))
            for planned in self.plan.engines
        ]
        self.routers = {
            planned.model: RouterServer(config, planned, log_dir, local=local) for planned in self.plan.routers
        }
        self._external = external_endpoints(config)
        self._may_be_paused = False
        self._is_ready = False
        self._router = self.routers[self.plan.default_router.model]

    @property
    def router_url(self) -> str:
        """Address of the default router."""
        return self._router.url

    @property
    def router_addresses(self) -> dict[str, tuple[str, int]]:
        """Host and port of every model's router, the default one first."""
        return {
            name: router.address
            for name, router in sorted(self.routers.items(), key=lambda r: not r[1].planned.default)
        }

    @property
    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        """The engines that get the trainer's weights."""
        own = tuple(server.endpoint for server in self.servers if server.planned.updatable)
        return own + self._external

    @property
    def urls(self) -> list[str]:
        """Addresses of the engines that get the trainer's weights."""
        return [endpoint.url for endpoint in self.endpoints]

    def start_router(self) -> None:
        """Start the routers, except one that was given; they serve before any engine is registered."""
        for router in self.routers.values():
            router.begin_host()
        for router in self.routers.values():
            router.launch()

    def launch(self) -> None:
        """Start all engine processes; ``wait_ready`` waits for them. Encoders come first: others need their address."""
        for server in self.servers:
            server.begin_hosts()
        encoders = [server for server in self.servers if server.planned.worker_type == "encoder"]
        for server in encoders:
            server.launch()
        self._wait_engines(encoders)
        for server in self.servers:
            if server not in encoders:
                server.launch([e.url for e in encoders if e.planned.model == server.planned.model])

    def wait_ready(self) -> None:
        """Wait for every process started so far, then register the engines in their routers.

        A second call asks nobody again: an engine that was ready may have given its memory away since.

        Raises:
            EngineError: One died; with the end of its log.
            WaitTimeoutError: One did not answer in time; likewise.
        """
        if self._is_ready:
            return
        limit = self._config.engine.engine_start_timeout_seconds
        ours = [router for router in self.routers.values() if router.is_ours]
        _wait_ready([router.process for router in ours], [router.readiness(limit) for router in ours], limit)
        self._wait_engines(self.servers)
        for model, router in self.routers.items():
            register(router.url, self._registrations(model), timeout_seconds=self._control_seconds)
        self._is_ready = True

    def check(self) -> None:
        """Raise EngineError if an engine or a router of ours died."""
        processes = [process for server in self.servers for process in server.processes]
        for error in failures([*processes, *(router.process for router in self.routers.values())]).values():
            raise error

    def weight_versions(self) -> list[str]:
        """Weight version of each engine that gets weights, as it reports it."""
        seconds = self._control_seconds
        replies = http_control.in_parallel(
            lambda u: http_control.request(f"{u}/model_info", timeout_seconds=seconds), self.urls
        )
        return [str(reply["weight_version"]) for reply in replies]

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Give the trainer the memory of the engines that share its devices; the cache is flushed first."""
        http_control.in_parallel(
            lambda url: flush_cache(url, timeout_seconds=self._control_seconds), self._offloaded_urls
        )
        self._to_offloaded("/release_memory_occupation", {"tags": list(tags) if tags else None})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take device memory back."""
        self._to_offloaded("/resume_memory_occupation", {"tags": list(tags) if tags else None})

    @contextmanager
    def getting_weights(self) -> Generator[None]:
        """Around an update: if it does not come to its end, ``close`` lets the engines go on that outlive the run."""
        self._may_be_paused = True
        yield
        self._may_be_paused = False

    def close(self, timeout_seconds: float = 8.0) -> None:
        """End engines and routers of ours; safe to call twice."""
        for model, router in self.routers.items():
            if not router.is_ours:
                deregister(router.url, [entry.url for entry in self._registrations(model)])
        hosted = [process for server in self.servers for process in server.processes]
        hosted += [router.process for router in self.routers.values()]
        refs = [ref for process in hosted if (ref := process.stop()) is not None]
        if self._may_be_paused:  # by a trainer that has ended
            release(self._external, has_session=True, timeout_seconds=_EXTERNAL_RELEASE_SECONDS)
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_seconds)
        for process in hosted:
            process.leave()

    def _wait_engines(self, servers: Sequence[EngineServer]) -> None:
        """Wait until engines answer; one that lost a port to another program is started again with other ports."""
        limit = self._config.engine.engine_start_timeout_seconds
        refs = {server.name: server.readiness(limit) for server in servers}
        for _ in range(_PORT_ATTEMPTS - 1):
            try:
                return _wait_ready([server.processes[0] for server in servers], list(refs.values()), limit)
            except PortTakenError as error:
                logger.warning("an engine is started again with other ports: %s", error)
            for server in servers:
                if _lost_its_port(refs[server.name]):
                    server.launch()
                    refs[server.name] = server.readiness(limit)
        return _wait_ready([server.processes[0] for server in servers], list(refs.values()), limit)

    def _registrations(self, model: str) -> list[Registration]:
        """What the router of a model is told; encoders serve other engines, not requests."""
        own = [
            server.registration
            for server in self.servers
            if server.planned.model == model and server.planned.worker_type != "encoder" and server.url
        ]
        return own + (external_registrations(self._config) if model == self.plan.default_router.model else [])

    def _environment(self, planned: PlannedEngine) -> dict[str, str]:
        """Environment of an engine's processes: their share of the cores."""
        cores = sorted(os.sched_getaffinity(0))
        count = sum(engine.num_gpus for engine in self.plan.engines)
        threads = int(os.environ.get("OMP_NUM_THREADS") or threads_per_process(len(cores), count))
        own = engine_environment(self._config, planned, num_processes=count, cores=cores)
        return {"OMP_NUM_THREADS": str(threads)} | nccl_environment(self._config) | own

    @property
    def _control_seconds(self) -> float:
        return self._config.engine.http_control_timeout_seconds

    @property
    def _offloaded_urls(self) -> list[str]:
        return [server.url for server in self.servers if server.planned.offloaded]

    def _to_offloaded(self, path: str, payload: Any) -> None:
        seconds = self._control_seconds
        http_control.in_parallel(
            lambda u: http_control.request(f"{u}{path}", payload, timeout_seconds=seconds), self._offloaded_urls
        )


def _wait_ready(processes: Sequence[HostedServer], refs: Sequence[Any], limit: float) -> None:
    waits.get_all(
        refs,
        waited_for=[f"{process.name} to be ready" for process in processes],
        timeout_seconds=limit + 10,
        on_death=lambda i: processes[i].death_of_host(),
    )


def _lost_its_port(ref: Any) -> bool:
    """Whether a readiness that is known by now is that failure."""
    if not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        waits.get(ref, waited_for="an engine to be ready", timeout_seconds=0.0)
    except SlimeError as error:  # another failure comes up again where all of them are waited for
        return isinstance(error, PortTakenError)
    return False
