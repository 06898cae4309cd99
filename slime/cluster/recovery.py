"""What becomes of a run when an engine or a router dies, freezes or answers nonsense.

Owns the decision: with ``--use-fault-tolerance`` the server is replaced in the background and serves again once it has
the trainer's weights; without it the run ends with one message. Tests hold: an engine without current weights gets no
request; the same engine failing again and again, and no engine being left, are errors; nothing is replaced twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from slime import http_control
from slime.cluster.engine_server import EngineServer
from slime.cluster.engines import EngineGroup
from slime.cluster.health import HealthMonitor
from slime.cluster.hosted_server import failures
from slime.cluster.registration import deregister, register
from slime.cluster.replacement import Replacement
from slime.cluster.router_server import RouterServer
from slime.config import Config
from slime.errors import EngineError, SlimeError, WaitTimeoutError

logger = logging.getLogger(__name__)

MAX_DEATHS_IN_A_ROW = 3
_HEALTH_ATTEMPTS = 2
_PATIENT_HEALTH_ATTEMPTS = 5  # where a failure ends the run
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 3.0

Server = EngineServer | RouterServer


class Recovery:
    """Watches the engines and routers of a run and replaces those that fail.

    Args:
        config: Resolved configuration.
        engines: Engines and routers.
        suspects: Engines that the rollout gets bad answers from: URL and fault. Must not block.
        weights_wait: Whether engines get weights from a trainer; a new one then waits for the next sync.
    """

    def __init__(
        self,
        config: Config,
        engines: EngineGroup,
        suspects: Callable[[], Mapping[str, str]],
        *,
        weights_wait: bool,
    ) -> None:
        cluster = config.cluster
        self._replaces = cluster.use_fault_tolerance
        self._engines = engines
        self._suspects = suspects
        self._weights_wait = weights_wait
        self._start_seconds = config.engine.engine_start_timeout_seconds
        self._control_seconds = config.engine.http_control_timeout_seconds
        self._lock = threading.RLock()
        self._replacing: dict[str, Replacement] = {}
        self._waiting: list[EngineServer] = []
        self._deaths: Counter[str] = Counter()
        self._error: SlimeError | None = None
        self._bring_weights: Callable[[], None] | None = None
        self._last_failure = ""
        self._released: Callable[[], Sequence[str]] = _nothing
        self._between = True  # engines get weights or sleep: that none serves is no news
        self._num_restarts = self._num_reported = 0
        self._monitor = HealthMonitor(
            lambda: self._addresses(lambda server: server.health_url),
            self._unhealthy,
            interval_seconds=cluster.rollout_health_check_interval,
            timeout_seconds=cluster.rollout_health_check_timeout,
            first_wait_seconds=cluster.rollout_health_check_first_wait,
            attempts=_HEALTH_ATTEMPTS if self._replaces else _PATIENT_HEALTH_ATTEMPTS,
        )
        self._interval_seconds = cluster.rollout_health_check_interval
        self._ask_at = 0.0
        self._monitor.start()

    def check(self) -> None:
        """Begin to replace what is dead; called about once a second while something is waited for.

        Raises:
            EngineError: The run cannot go on: nothing may be replaced, a replacement failed, or no engine is left.
        """
        replacing = self.look()
        with self._lock:
            missing = None if self._between else self._missing()
        if missing is None:
            return
        # Elsewhere than in the main thread the trainer may be at work meanwhile.
        if self._bring_weights is None or threading.current_thread() is not threading.main_thread():
            raise EngineError(missing)
        if not replacing:
            logger.warning("the engines that were replaced get weights in the middle of a rollout: no other is left")
            self._bring_weights()

    def bring_weights_with(self, bring_weights: Callable[[], None]) -> None:
        """Have engines get weights while the trainer waits for a rollout, when no engine is left otherwise.

        Args:
            bring_weights: Settles, sends the weights, lets the engines serve and watches them.
        """
        self._bring_weights = bring_weights

    def match_memory(self, released: Callable[[], Sequence[str]]) -> None:
        """Have a new engine give away as much of its device memory as the others have given away.

        Args:
            released: Tells the tags of it, asked once the new engine is there.
        """
        self._released = released

    def look(self) -> bool:
        """Look for dead servers; whether any is being replaced.

        Raises:
            EngineError: The run cannot go on.
        """
        with self._lock:
            self._take_finished()
            known = [server for server in self._servers if server.name not in self._replacing]
            dead = failures([process for server in known for process in server.processes])
            for server in known:
                reason = next((dead[process.name] for process in server.processes if process.name in dead), None)
                if reason is not None:
                    self._fail(server, reason)
            for server, fault in self._liars():
                self._fail(server, EngineError(f"{server.name} answers requests badly: {fault}"))
            if self._error is not None:
                raise self._error
            return bool(self._replacing)

    def settle(self) -> None:
        """Stop checking, and wait until everything that died is there again, before engines sleep or get weights.

        Raises:
            EngineError: It is not coming back.
        """
        self._monitor.pause()
        with self._lock:
            self._between = True
        self._ask_at = time.monotonic() + self._interval_seconds
        while self.look():
            time.sleep(_POLL_SECONDS)

    def look_while_updating(self) -> bool:
        """Like ``look``, and once per interval ask engines that get weights whether they answer at all.

        They may be paused, so that they could not generate.
        """
        if time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + self._interval_seconds
            self._monitor.ask_now(self._addresses(lambda server: server.alive_url))
        return self.look()

    def found_cause(self) -> bool:
        """After a failed sync: whether a server failed that is being replaced, so that a second try may succeed."""
        self._ask_at = 0.0
        return self._replaces and (self.look() or self.look_while_updating())

    def serve(self) -> None:
        """Let new engines serve, now that all engines have current weights."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for server in waiting:
                self._register(server)

    def watch(self) -> None:
        """Check from now on; engines are awake."""
        with self._lock:
            self._between = False
        self._monitor.resume()

    def rollout_complete(self) -> dict[str, float]:
        """Forget the deaths of servers that have served a whole rollout; metrics of the time since the last call."""
        with self._lock:
            for server in self._servers:
                if server.name not in self._replacing and server not in self._waiting:
                    self._deaths.pop(server.name, None)
            new, self._num_reported = self._num_restarts - self._num_reported, self._num_restarts
        return {"rollout/engine_restarts": float(new)} if self._replaces else {}

    def summary(self) -> str | None:
        """One line for the end of a run; None if nothing happened."""
        if not self._num_restarts:
            return None
        return f"{self._num_restarts} engine or router restarts; the last failure: {self._last_failure}"

    def close(self) -> None:
        """End checks and replacements; call it before the engines are closed."""
        self._monitor.close()
        with self._lock:
            replacing = list(self._replacing.values())
            self._error = self._error or EngineError("the run has ended")
        for replacement in replacing:
            replacement.cancel(_CLOSE_SECONDS)

    @property
    def _servers(self) -> list[Server]:
        routers = [router for router in self._engines.routers.values() if router.is_ours]
        return [*self._engines.servers, *routers]

    def _addresses(self, address: Callable[[Server], str]) -> dict[str, str]:
        with self._lock:
            return {server.name: address(server) for server in self._servers if server.name not in self._replacing}

    def _unhealthy(self, name: str, url: str, reason: str) -> None:
        with self._lock:
            for server in self._servers:
                if server.name == name and url in (server.health_url, server.alive_url):
                    dead = failures(server.processes).values()  # says more than that it does not answer
                    unwell = EngineError(f"{name} failed its health checks: {reason}")
                    self._fail(server, next(iter(dead), unwell))

    def _liars(self) -> list[tuple[EngineServer, str]]:
        """Engines to be replaced for what they answer; as long as others answer well, it is not the requests' fault."""
        suspects = self._suspects() if self._replaces else {}
        serving = [server for server in self._serving() if server.url not in suspects]
        return [
            (server, suspects[server.url])
            for server in self._serving()
            if server.url in suspects and any(_alike(server, other) for other in serving)
        ]

    def _gets_weights(self, server: EngineServer) -> bool:
        return server.planned.updatable and self._weights_wait

    def _serving(self) -> list[EngineServer]:
        return [
            server
            for server in self._engines.servers
            if server.name not in self._replacing and server not in self._waiting
        ]

    def _missing(self) -> str | None:
        """What keeps the run from generating, if anything does."""
        serving = self._serving()
        for server in self._engines.servers:
            comes_back = not self._gets_weights(server)
            if not comes_back and not any(_alike(server, other) for other in serving):
                kind = "" if server.planned.worker_type == "regular" else f"{server.planned.worker_type} "
                return (
                    f"no {kind}engine is left that serves {server.planned.model}, and a new one gets weights only "
                    f"when the trainer is free. The last failure: {self._last_failure}"
                )
        return None

    def _fail(self, server: Server, error: SlimeError) -> None:
        """Replace a server, unless that is under way or may not be."""
        if server.name in self._replacing or self._error is not None:
            return
        if not self._replaces:
            self._error = error
            return
        self._deaths[server.name] += 1
        self._last_failure = str(error).splitlines()[0].partition("; end of ")[0]
        if self._deaths[server.name] > MAX_DEATHS_IN_A_ROW:
            self._error = EngineError(
                f"{server.name} failed {self._deaths[server.name]} times without serving a whole rollout in between; "
                f"the last time: {error}"
            )
            return
        log = server.processes[0].log_path
        logger.warning("%s is replaced: %s; its log is %s", server.name, self._last_failure, log)
        self._num_restarts += 1
        self._waiting = [other for other in self._waiting if other is not server]
        self._replacing[server.name] = self._replacement(server)

    def _replacement(self, server: Server) -> Replacement:
        if isinstance(server, RouterServer):
            return Replacement(
                server,
                prepare=lambda: None,
                finish=lambda: self._register_all(server),
                timeout_seconds=self._start_seconds,
            )
        router, url = self._engines.routers[server.planned.model], server.url
        return Replacement(
            server,
            prepare=lambda: deregister(router.url, [url]),
            finish=lambda: self._fit_in(server),
            timeout_seconds=self._start_seconds,
        )

    def _fit_in(self, server: EngineServer) -> None:
        """A new engine serves at once if nobody gives it weights; else it waits for them as the others are."""
        if not self._gets_weights(server):
            self._register(server)
        elif server.planned.offloaded and (tags := list(self._released())):
            for path, body in (("/flush_cache", {}), ("/release_memory_occupation", {"tags": tags})):
                http_control.request(f"{server.url}{path}", body, timeout_seconds=self._control_seconds)

    def _take_finished(self) -> None:
        for name, replacement in list(self._replacing.items()):
            if not replacement.is_done:
                continue
            del self._replacing[name]
            server, error = replacement.server, replacement.error
            if isinstance(error, WaitTimeoutError):
                self._error = self._error or error
            elif error is not None:
                self._fail(server, error)
            elif isinstance(server, EngineServer) and self._gets_weights(server):
                self._waiting.append(server)

    def _register(self, server: EngineServer) -> None:
        if server.planned.worker_type != "encoder":
            router = self._engines.routers[server.planned.model]
            register(router.url, [server.registration], timeout_seconds=self._control_seconds)

    def _register_all(self, router: RouterServer) -> None:
        with self._lock:
            serving: Sequence[EngineServer] = self._serving()
        entries = [
            server.registration
            for server in serving
            if server.planned.model == router.planned.model and server.planned.worker_type != "encoder"
        ]
        register(router.url, entries, timeout_seconds=self._control_seconds)


def _nothing() -> tuple[str, ...]:
    """Released by engines that keep their memory."""
    return ()


def _alike(one: EngineServer, other: EngineServer) -> bool:
    """Whether one can serve what the other does."""
    return (one.planned.model, one.planned.worker_type) == (other.planned.model, other.planned.worker_type)
