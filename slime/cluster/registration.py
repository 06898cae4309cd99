"""Engines in a router's list: entered, waited for, taken out.

Tests hold, against the real router: an engine is served once it is listed healthy, and no longer after it was taken
out; a prefill engine is listed with its bootstrap port.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime import http_control
from slime.cluster.process import responds
from slime.errors import EngineError, WaitTimeoutError
from slime.observability.watchdog import wait_until

logger = logging.getLogger(__name__)

_REMOVAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a router is told of an engine.

    Args:
        url: Base URL.
        worker_type: ``regular``, ``prefill`` or ``decode``.
        bootstrap_port: Of a prefill engine.
    """

    url: str
    worker_type: str = "regular"
    bootstrap_port: int | None = None

    def payload(self) -> dict[str, Any]:
        """Body of ``POST /workers``.

        Raises:
            EngineError: A prefill engine without bootstrap port.
        """
        if self.worker_type == "regular":
            return {"url": self.url}
        body: dict[str, Any] = {"url": self.url, "worker_type": self.worker_type}
        if self.worker_type == "prefill":
            if self.bootstrap_port is None:
                raise EngineError(f"prefill engine {self.url} has no bootstrap port, so no decode engine can meet it")
            body["bootstrap_port"] = self.bootstrap_port
        return body


def register(router_url: str, engines: Sequence[Registration], *, timeout_seconds: float) -> None:
    """Enter engines and wait until the router lists all of them as healthy.

    Raises:
        EngineError: The router refused.
        WaitTimeoutError: It does not accept them in time.
    """
    for engine in engines:
        http_control.request(f"{router_url}/workers", engine.payload(), timeout_seconds=timeout_seconds)
    if not engines:
        return
    urls = {engine.url for engine in engines}

    def all_listed() -> bool:
        healthy = {w["url"].rstrip("/") for w in workers(router_url, timeout_seconds) if w["is_healthy"]}
        return healthy >= urls and responds(f"{router_url}/readiness")

    wait_until(
        all_listed,
        waiter="the driver",
        waited_for=f"the router at {router_url} to accept {len(urls)} engines",
        timeout_seconds=timeout_seconds,
    )


def deregister(router_url: str, urls: Sequence[str]) -> None:
    """Take engines out of a router's list; a router that does not answer has no list worth correcting."""
    try:
        known = {w["url"].rstrip("/"): w["id"] for w in workers(router_url, _REMOVAL_SECONDS)}
        for url in urls:
            if url in known:
                address = f"{router_url}/workers/{known[url]}"
                http_control.request(address, timeout_seconds=_REMOVAL_SECONDS, method="DELETE")
    except (EngineError, WaitTimeoutError) as error:
        logger.info("engines were not taken out of the router's list: %s", error)


def workers(router_url: str, timeout_seconds: float) -> list[dict[str, Any]]:
    """Engines that a router knows, as it describes them."""
    reply = http_control.request(f"{router_url}/workers", timeout_seconds=timeout_seconds)
    return cast("list[dict[str, Any]]", reply["workers"])
