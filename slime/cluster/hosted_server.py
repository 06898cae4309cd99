"""A server process inside a small actor on its node, which can be ended and started again.

Owns one such process from start to end: its host actor, its address, readiness, liveness. What it
serves is its owner's business. Tests hold: a dead server or host is told with the end of the log;
``kill`` ends a frozen one with its children at once; it starts again in the same place; a server that lost its
port to another process is told apart from one that failed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slime.cluster import waits
from slime.cluster.actor import ActorSetting, enter
from slime.cluster.host_pulls import FILES_THREAD
from slime.cluster.ports import free_port_runs
from slime.cluster.process import ServerProcess
from slime.errors import EngineError, SlimeError
from slime.weights.host_pull import pull
from slime.weights.pull_request import PullReport, PullRequest

CHECK_SECONDS = 30.0
KILL_SECONDS = 10.0


_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port is already in use|is not available in \d+ s", re.I)
_PORT_LINES = 200
_HOST_SUFFIX = " host"


class PortTakenError(EngineError):
    """The server ended because another process had taken one of its ports in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Where a server is.

    Args:
        node_id: Ray's name of the node.
        address: Where its servers bind and are reached.
        visible_gpus: ``CUDA_VISIBLE_DEVICES`` there; None for all.
    """

    node_id: str
    address: str
    visible_gpus: str | None = None

    def local_gpu(self, gpu_id: int) -> int:
        """Number that a process there has for a GPU of the node: its place among the visible ones."""
        visible = [entry.strip() for entry in (self.visible_gpus or "").split(",")]
        return visible.index(str(gpu_id)) if str(gpu_id) in visible else gpu_id


class ServerActor:
    """Hosts one server process on its node, so that it ends with the run wherever it is."""

    def __init__(self, setting: ActorSetting) -> None:
        enter(setting)
        self._setting = setting
        self._process: ServerProcess | None = None

    def facts(self, local: bool) -> HostFacts:
        """Where this is; ``local`` when the whole run is on one machine."""
        return HostFacts(
            node_id=str(ray.get_runtime_context().get_node_id()),
            address="127.0.0.1" if local else str(ray.util.get_node_ip_address()),
            visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES") or None,
        )

    def free_ports(self, start: int, widths: Sequence[int]) -> list[int]:
        """First ports of free runs of the given widths, from ``start`` on."""
        return free_port_runs(start, widths)

    def launch(self, command: list[str], log_path: Path, env: dict[str, str]) -> None:
        """Start the server; one that is still there is ended first."""
        self.stop()
        name = self._setting.name.removesuffix(_HOST_SUFFIX)  # messages are about the server
        self._process = ServerProcess(name, command, log_path=log_path, env=env)

    def wait_ready(self, url: str, timeout_seconds: float) -> None:
        """Wait until ``url`` answers.

        Raises:
            PortTakenError: The server ended because a port of it was in use.
            EngineError: It ended for another reason.
            WaitTimeoutError: It did not answer in time.
        """
        assert self._process is not None
        try:
            self._process.wait_ready(url, timeout_seconds=timeout_seconds)
        except EngineError as error:
            if _PORT_TAKEN.search(self._process.log_tail(_PORT_LINES)):
                raise PortTakenError(str(error)) from None
            raise

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

    def kill(self) -> None:
        """End the server and its children by force; its log shows that this was meant."""
        if self._process is not None:
            self._process.kill()
            self._process = None


class HostedServer:
    """The driver's side of one server.

    Args:
        name: For messages, for example ``"engine 0"``.
        options: Ray options of its host: where it runs.
        log_dir: Where its log is written.
        local: Whether the cluster is this machine alone.
        timeout_seconds: Bound on the actor's start and on each short call.
    """

    def __init__(
        self, name: str, options: dict[str, Any], log_dir: Path, *, local: bool, timeout_seconds: float
    ) -> None:
        self.name = name
        self.log_path = log_dir / f"{name.replace(' ', '_')}.log"
        self._options = options
        self._setting = ActorSetting.of(f"{name}{_HOST_SUFFIX}", log_dir)
        self._local = local
        self._timeout_seconds = timeout_seconds
        self._actor: Any = None
        self._facts: HostFacts | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether there is a host actor, and with it perhaps a server."""
        return self._actor is not None

    @property
    def actor(self) -> Any:
        """Handle of the host actor; None if there is none."""
        return self._actor

    def begin_host(self) -> None:
        """Start the host actor unless there is one; ``host`` waits for it."""
        if self._actor is None:
            self._facts = None
            self._actor = (
                ray.remote(concurrency_groups={FILES_THREAD: 1})(ServerActor)
                .options(**self._options)
                .remote(self._setting)
            )

    def host(self) -> HostFacts:
        """Start the host actor unless there is one; where it is."""
        self.begin_host()
        if self._facts is None:
            self._facts = self._get(self._actor.facts.remote(self._local), "host")
        return self._facts

    def free_ports(self, start: int, widths: Sequence[int]) -> list[int]:
        """First ports of free runs of the given widths on its node, from ``start`` on."""
        return self._get(self._actor.free_ports.remote(start, list(widths)), "ports")

    def launch(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        """Start the process; returns before it is ready."""
        self._get(self._actor.launch.remote(list(command), self.log_path, env or {}), "launch")

    def readiness(self, url: str, timeout_seconds: float) -> Any:
        """Reference that is there when ``url`` answers 200, or fails when the process died or took too long.

        The host answers nothing else until then.
        """
        return self._actor.wait_ready.remote(url, timeout_seconds)

    def kill(self) -> None:
        """End the process and its children at once; a host that is gone or does not answer goes too."""
        actor = self._actor
        if actor is None:
            return
        try:
            waits.get(actor.kill.remote(), waited_for=f"{self.name} to be killed", timeout_seconds=KILL_SECONDS)
        except SlimeError:
            ray.kill(actor)  # its server dies with it
            self._actor = None

    def stop(self) -> Any:
        """Begin an orderly end; the reference is there when the process has ended, None if there is none."""
        return None if self._actor is None else self._actor.stop.remote()

    def leave(self) -> None:
        """End the host actor."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)

    def check_begun(self) -> Any:
        """Begin to look whether the process lives; the reference fails with what it died of."""
        return self._actor.check.remote()

    def death_of_host(self) -> SlimeError:
        """The error for a host actor that is gone."""
        return EngineError(f"the process hosting {self.name} died; {self._setting.log_tail()}")

    def _get(self, ref: Any, waited_for: str) -> Any:
        return waits.get(
            ref,
            waited_for=f"{self.name} {waited_for}",
            timeout_seconds=self._timeout_seconds,
            on_death=lambda _: self.death_of_host(),
        )


def failures(servers: Sequence[HostedServer]) -> dict[str, SlimeError]:
    """What became of the servers that are dead, by name; a host that does not answer counts as dead."""
    hosted = [server for server in servers if server.is_hosted]
    refs = [server.check_begun() for server in hosted]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=CHECK_SECONDS)
    dead: dict[str, SlimeError] = {}
    for server, ref in zip(hosted, refs, strict=True):
        try:
            waits.get(
                ref,
                waited_for=f"the host of {server.name}",
                timeout_seconds=0.0,
                on_death=lambda _, server=server: server.death_of_host(),
            )
        except SlimeError as error:
            dead[server.name] = error
    return dead
