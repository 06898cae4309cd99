"""The engines behind a router, as it lists them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slime.errors import EngineError
from slime.rollout.faults import EngineRequestError

KEEP_SECONDS = 30.0
STALE_SECONDS = 1.0
MAX_SHOWN_CHARS = 500

Control = Callable[[str, str, Any, float], Awaitable[Any]]
"""Sends one control request: method, URL, JSON body or None, bound in seconds; the decoded reply."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine.

    Args:
        url: Where it answers.
        is_healthy: Whether the router sends it requests.
        is_regular: Whether it serves a request alone; one that only prefills or decodes does not.
    """

    url: str
    is_healthy: bool = True
    is_regular: bool = True


class WorkerDirectory:
    """Asks a router for its engines and remembers them for a while.

    Args:
        base_url: The router, or a bare engine, which is then the only one.
        control: Sends the requests.
        control_seconds: Bound of each.
    """

    def __init__(self, base_url: str, control: Control, control_seconds: float) -> None:
        self._base_url = base_url
        self._control = control
        self._control_seconds = control_seconds
        self._fresh_until = 0.0
        self.healthy_urls: list[str] = []
        self.serve_alone = True

    async def all(self, total_seconds: float | None = None) -> list[Worker]:
        """The engines of now.

        Raises:
            EngineError: The answer is no list of engines.
            WaitTimeoutError: There is no answer.
        """
        seconds = self._control_seconds if total_seconds is None else min(total_seconds, self._control_seconds)
        try:
            reply = await self._control("GET", f"{self._base_url}/workers", None, seconds)
        except EngineRequestError as error:
            if error.status in (404, 405):
                return [Worker(self._base_url)]
            raise
        workers = reply.get("workers") if isinstance(reply, dict) else None
        if not isinstance(workers, list):
            shown = str(reply)[:MAX_SHOWN_CHARS]
            raise EngineError(f"GET {self._base_url}/workers answered {shown}; expected 'workers'")
        return [
            Worker(
                str(w["url"]).rstrip("/"),
                is_healthy=bool(w.get("is_healthy", True)),
                is_regular=w.get("worker_type", "regular") == "regular",
            )
            for w in workers
        ]

    async def healthy(self) -> list[str]:
        """URLs of the engines that take requests, in a stable order; asked anew every ``KEEP_SECONDS``.

        Raises:
            EngineError: There are none.
        """
        now = time.monotonic()
        if now >= self._fresh_until:
            workers = await self.all()
            healthy = sorted(worker.url for worker in workers if worker.is_healthy)
            if not healthy:
                raise EngineError(f"router {self._base_url} knows no healthy engine")
            self.healthy_urls, self._fresh_until = healthy, now + KEEP_SECONDS
            self.serve_alone = all(worker.is_regular for worker in workers)
        return self.healthy_urls

    def doubt(self) -> None:
        """Ask anew soon: an engine did not answer. Not at once, since many requests find that out together."""
        self._fresh_until = min(self._fresh_until, time.monotonic() + STALE_SECONDS)

    def knows(self, url: str) -> bool:
        """Whether a request to ``url`` is one to the router or to one of its engines."""
        return any(url.startswith(f"{known}/") for known in (self._base_url, *self.healthy_urls))
