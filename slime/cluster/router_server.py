"""A router in front of one model's engines: started here, or one that already runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from slime.cluster import waits
from slime.cluster.hosted_server import HostedServer
from slime.cluster.ports import PROMETHEUS_PORTS, ROUTER_PORTS
from slime.cluster.router import router_command, router_values
from slime.config import Config
from slime.config.engine_plan import PlannedRouter


class RouterServer:
    """The driver's side of one router.

    Args:
        config: Resolved configuration.
        planned: Whose router it is. The default one may be a router that already runs.
        log_dir: Where ``router.log`` is written, or ``router_of_{model}.log`` for a further model.
        local: Whether the cluster is this machine alone.
    """

    def __init__(self, config: Config, planned: PlannedRouter, log_dir: Path, *, local: bool) -> None:
        self.planned = planned
        self._config = config
        given = planned.default and config.engine.sglang_router_ip is not None
        self._ip = config.engine.sglang_router_ip or "" if given else ""
        self._port = config.engine.sglang_router_port or 0 if planned.default else 0
        self._hosted = HostedServer(
            "router" if planned.default else f"router of {planned.model}",
            waits.on_this_node(),
            log_dir,
            local=local,
            timeout_seconds=config.cluster.cluster_start_timeout_seconds,
        )
        self.is_ours = not given

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._hosted.name

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, known once it was launched."""
        return self._ip, self._port

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://{self._ip}:{self._port}"

    @property
    def process(self) -> HostedServer:
        """Its process; not hosted when the router is not ours."""
        return self._hosted

    @property
    def processes(self) -> list[HostedServer]:
        """The same as of an engine: all its processes."""
        return [self._hosted]

    @property
    def ready_url(self) -> str:
        """Answers 200 when the router serves, whether or not it has an engine."""
        return f"{self.url}/liveness"

    @property
    def health_url(self) -> str:
        """Answers 200 when it serves."""
        return self.ready_url

    @property
    def alive_url(self) -> str:
        """Answers 200 whatever engines do."""
        return self.ready_url

    def kill(self) -> None:
        """End a router of ours at once."""
        self._hosted.kill()

    def begin_host(self) -> None:
        """Start the host actor of a router of ours; ``launch`` waits for it."""
        if self.is_ours:
            self._hosted.begin_host()

    def launch(self) -> None:
        """Start a router of ours, again at the same address if it was started before; returns before it is ready."""
        if not self.is_ours:
            return
        host = self._hosted.host().address
        if not self._port:
            self._port = self._free_port(ROUTER_PORTS)
        values = router_values(
            self._config,
            host=host,
            port=self._port,
            prometheus_port=self._free_port(PROMETHEUS_PORTS),
            disaggregated=self.planned.disaggregated,
        )
        self._ip = host
        self._hosted.launch(router_command(values))

    def readiness(self, timeout_seconds: float) -> Any:
        """Reference that is there when a router of ours answers."""
        return self._hosted.readiness(self.ready_url, timeout_seconds)

    def _free_port(self, candidates: range) -> int:
        return self._hosted.free_ports(random.choice(candidates), (1,))[0]
