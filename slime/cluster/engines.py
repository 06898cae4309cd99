"""The inference engines of a run and the router in front of them.

Owns their processes (each inside a small actor on its node), readiness, registration, liveness
and memory turns. Requests for samples are not its business. Tests hold: a dead engine or router
raises ``EngineError`` with the end of its log; nothing survives the driver.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slime import http_control
from slime.cluster import waits
from slime.cluster.actor import ActorSetting, enter
from slime.cluster.engine_commands import engine_command, engine_environment
from slime.cluster.host_pulls import FILES_THREAD, ActorPull
from slime.cluster.placement import ENGINE_SHARE, Placement
from slime.cluster.process import ServerProcess, free_port, responds
from slime.cluster.router import router_command, router_values
from slime.cluster.trainer import threads_per_process
from slime.config import Config
from slime.errors import EngineError, SlimeError
from slime.observability.watchdog import wait_until
from slime.weights.endpoint import EngineEndpoint
from slime.weights.host_pull import pull
from slime.weights.pull_request import PullReport, PullRequest

logger = logging.getLogger(__name__)

# The first port tried is random in a range, so that runs which start at the same moment rarely meet.
ENGINE_PORTS = range(15000, 19000)
ROUTER_PORTS = range(3000, 4000)
PROMETHEUS_PORTS = range(4000, 5000)
_CHECK_SECONDS = 30.0


class ServerActor:
    """Hosts one server process on its node, so that it ends with the run wherever it is."""

    def __init__(self, setting: ActorSetting) -> None:
        enter(setting)
        self._setting = setting
        self._process: ServerProcess | None = None

    def address(self, local: bool) -> str:
        """Address to bind and to be reached at."""
        return "127.0.0.1" if local else str(ray.util.get_node_ip_address())

    def free_port(self, start: int) -> int:
        """A free port from ``start`` on."""
        return free_port(start)

    def launch(self, command: list[str], log_path: Path, env: dict[str, str]) -> None:
        """Start the server."""
        self._process = ServerProcess(self._setting.name, command, log_path=log_path, env=env)

    def wait_ready(self, url: str, timeout_seconds: float) -> None:
        """Wait until ``url`` answers."""
        assert self._process is not None
        self._process.wait_ready(url, timeout_seconds=timeout_seconds)

    def check(self) -> None:
        """Raise EngineError if the server died."""
        if self._process is not None:
            self._process.check()

    def pull(self, request: PullRequest) -> PullReport:
        """Bring this host's checkpoint up to a published version."""
        return pull(request)

    def stop(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.stop()


class EngineGroup:
    """All engines and the router as one."""

    def __init__(self, config: Config, placement: Placement, log_dir: Path) -> None:
        """Prepare; nothing is started yet.

        Args:
            config: Resolved configuration.
            placement: Reserved slots.
            log_dir: Where ``engine_{i}.log`` and ``router.log`` are written.
        """
        self._config = config
        self._placement = placement
        self._log_dir = log_dir
        self._local = len([n for n in ray.nodes() if n["Alive"]]) == 1
        self._actors: dict[str, Any] = {}
        self._ready: list[tuple[str, Any]] = []
        external = config.rollout.rollout_external_engine_addrs or ()
        self.urls: list[str] = [a if a.startswith("http") else f"http://{a}" for a in external]
        self.router_ip = config.engine.sglang_router_ip
        self.router_port = config.engine.sglang_router_port

    @property
    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        """The engines that get the trainer's weights."""
        layout, per_engine = self._placement.layout, self._config.cluster.rollout_num_gpus_per_engine
        rank_of = {slot: rank for rank, slot in enumerate(layout.trainer)}
        endpoints: list[EngineEndpoint] = []
        for index, url in enumerate(self.urls):
            numbers = layout.rollout[index * per_engine : (index + 1) * per_engine]  # none for one that runs elsewhere
            slots = [self._placement.slots[number] for number in numbers]
            endpoints.append(
                EngineEndpoint(
                    url=url,
                    name=f"engine {index}",
                    backend="sglang" if self._config.engine.rollout_backend == "sglang" else "embedded",
                    num_gpus=per_engine,
                    node_id=slots[0].node_id if slots else None,
                    gpu_ids=tuple(slot.gpu_id for slot in slots if slot.gpu_id is not None),
                    trainer_ranks=tuple(rank_of[number] for number in numbers if number in rank_of),
                    model_path=self._config.rollout.hf_checkpoint,
                    local_dir=self._config.weights.update_weight_local_checkpoint_dir,
                    pull=ActorPull(f"engine {index}", (self._actors[f"engine {index}"],)) if slots else None,
                )
            )
        return tuple(endpoints)

    @property
    def router_url(self) -> str:
        """Address of the router."""
        return f"http://{self.router_ip}:{self.router_port}"

    def start_router(self) -> None:
        """Start the router unless one was given; it serves before any engine is registered."""
        if self._config.engine.sglang_router_ip is not None:
            return
        actor = self._host("router", waits.on_this_node())
        host = self._get(actor.address.remote(self._local), "router host")
        port = self._config.engine.sglang_router_port or self._get(
            actor.free_port.remote(random.choice(ROUTER_PORTS)), "router port"
        )
        metrics_port = self._get(actor.free_port.remote(random.choice(PROMETHEUS_PORTS)), "router metrics port")
        values = router_values(self._config, host=host, port=port, prometheus_port=metrics_port)
        self.router_ip, self.router_port = host, port
        launched = actor.launch.remote(router_command(values), self._log_dir / "router.log", {})
        self._get(launched, "the router to be launched")
        limit = self._config.engine.engine_start_timeout_seconds
        self._ready.append(("router", actor.wait_ready.remote(f"{self.router_url}/liveness", limit)))

    def launch(self) -> None:
        """Start all engine processes; ``wait_ready`` waits for them."""
        per_engine = self._config.cluster.rollout_num_gpus_per_engine
        slots = self._placement.layout.rollout
        first_slots = slots[: len(slots) // per_engine * per_engine : per_engine]
        if not first_slots:
            return
        cores = sorted(os.sched_getaffinity(0))
        threads = int(os.environ.get("OMP_NUM_THREADS") or threads_per_process(len(cores), len(first_slots)))
        for index, slot in enumerate(first_slots):
            # Engines place themselves by GPU id: show them every GPU of the node.
            env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            options = self._placement.options(slot, ENGINE_SHARE) | {"runtime_env": {"env_vars": env}}
            actor = self._host(f"engine {index}", options)
            host = self._get(actor.address.remote(self._local), f"engine {index} host")
            port = self._get(actor.free_port.remote(random.choice(ENGINE_PORTS)), f"engine {index} port")
            command = engine_command(
                self._config,
                index=index,
                host=host,
                port=port,
                base_gpu_id=self._placement.slots[slot].gpu_id or 0,
            )
            log_path = self._log_dir / f"engine_{index}.log"
            process_env = {"OMP_NUM_THREADS": str(threads)} | engine_environment(
                self._config, index=index, num_engines=len(first_slots), cores=cores
            )
            self._get(actor.launch.remote(command, log_path, process_env), f"engine {index} to be launched")
            url = f"http://{host}:{port}"
            self.urls.append(url)
            limit = self._config.engine.engine_start_timeout_seconds
            self._ready.append((f"engine {index}", actor.wait_ready.remote(f"{url}/health", limit)))

    def wait_ready(self) -> None:
        """Wait for every process started so far, then register the engines in the router.

        Raises:
            EngineError: One died; with the end of its log.
            WaitTimeoutError: One did not answer in time; likewise.
        """
        limit = self._config.engine.engine_start_timeout_seconds
        waits.get_all(
            [ref for _, ref in self._ready],
            waited_for=[f"{name} to be ready" for name, _ in self._ready],
            timeout_seconds=limit + 10,
            on_death=lambda i: self._death(self._ready[i][0]),
        )
        self._ready = []
        for url in self.urls:
            http_control.request(f"{self.router_url}/workers", {"url": url}, timeout_seconds=self._control_seconds)
        if self.urls:
            wait_until(
                self._all_registered,
                waiter="the driver",
                waited_for=f"the router at {self.router_url} to accept {len(self.urls)} engines",
                timeout_seconds=self._control_seconds,
            )

    def _all_registered(self) -> bool:
        reply = http_control.request(f"{self.router_url}/workers", timeout_seconds=self._control_seconds)
        healthy = {w["url"].rstrip("/") for w in reply["workers"] if w["is_healthy"]}
        return healthy >= set(self.urls) and responds(f"{self.router_url}/readiness")

    def check(self) -> None:
        """Raise EngineError if an engine or the router died."""
        waits.get_all(
            [actor.check.remote() for actor in self._actors.values()],
            waited_for=[f"the host of {name}" for name in self._actors],
            timeout_seconds=_CHECK_SECONDS,
            on_death=lambda i: self._death(list(self._actors)[i]),
        )

    def weight_versions(self) -> list[str]:
        """Weight version of each engine, as it reports it."""
        seconds = self._control_seconds
        replies = http_control.in_parallel(
            lambda u: http_control.request(f"{u}/model_info", timeout_seconds=seconds), self.urls
        )
        return [str(reply["weight_version"]) for reply in replies]

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Give the engines' device memory to the trainer; the cache is flushed first."""
        self._post("/flush_cache", {})
        self._post("/release_memory_occupation", {"tags": list(tags) if tags else None})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take device memory back."""
        self._post("/resume_memory_occupation", {"tags": list(tags) if tags else None})

    def close(self, timeout_seconds: float = 8.0) -> None:
        """End engines, then the router; safe to call twice."""
        actors, self._actors = self._actors, {}
        refs = [actor.stop.remote() for actor in actors.values()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_seconds)
        for actor in actors.values():
            ray.kill(actor)

    @property
    def _control_seconds(self) -> float:
        return self._config.engine.http_control_timeout_seconds

    def _post(self, path: str, payload: Any) -> None:
        seconds = self._control_seconds
        http_control.in_parallel(
            lambda u: http_control.request(f"{u}{path}", payload, timeout_seconds=seconds), self.urls
        )

    def _host(self, name: str, options: dict[str, Any]) -> Any:
        setting = ActorSetting.of(f"{name} host", self._log_dir)
        actor = ray.remote(concurrency_groups={FILES_THREAD: 1})(ServerActor).options(**options).remote(setting)
        self._actors[name] = actor
        return actor

    def _get(self, ref: Any, waited_for: str) -> Any:
        return waits.get(ref, waited_for=waited_for, timeout_seconds=self._config.cluster.cluster_start_timeout_seconds)

    def _death(self, name: str) -> SlimeError:
        log = ActorSetting.of(f"{name} host", self._log_dir)
        return EngineError(f"the process hosting {name} died; {log.log_tail()}")
