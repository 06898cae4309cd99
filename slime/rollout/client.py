"""HTTP to the router and the engines.

Owns every request that the rollout sends: bounded waits, retries of transient faults, abort. It
knows neither samples nor tokens. A client belongs to the loop it was opened on; calls from other
loops are carried over to it, so that plug-ins with loops of their own share its connections.
Tests hold, against a real server: 4xx raises at once with the body, 429 / 5xx / refused
connections are retried within the stated bounds, and a hanging server costs a stated time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp

from slime.errors import EngineError, WaitTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BODY_CHARS = 500
FIRST_ABORT_RESEND_SECONDS = 0.25
MAX_ABORT_RESEND_SECONDS = 3.0
MIN_CONTROL_SECONDS = 1.0
WORKERS_SECONDS = 30.0
RETRY_PAUSE_SECONDS = 0.25
MAX_RETRY_PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    """How long the client waits.

    Args:
        connect_seconds: For a connection to be accepted.
        request_seconds: For the reply to a request, all attempts and pauses included.
        control_seconds: For one control request (workers, loads, abort).
        abort_seconds: For all engines to become idle after an abort.
        max_retries: Attempts after the first one, for transient faults only.
    """

    connect_seconds: float = 10.0
    request_seconds: float = 3600.0
    control_seconds: float = 120.0
    abort_seconds: float = 60.0
    max_retries: int = 5

    @classmethod
    def from_args(cls, args: Any) -> ClientTimeouts:
        """The bounds that the flags set."""
        return cls(
            connect_seconds=args.http_connect_timeout_seconds,
            request_seconds=args.http_request_timeout_seconds,
            control_seconds=args.http_control_timeout_seconds,
            abort_seconds=args.abort_timeout_seconds,
            max_retries=args.http_max_retries,
        )


class EngineRequestError(EngineError):
    """The engine refused a request with a 4xx status.

    Args:
        message: Method, URL, status and the body.
        status: The HTTP status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(EngineRequestError, status=self.status), self.args


class _TransientFaultError(Exception):
    """One attempt failed in a way that another attempt may not; stays inside this module."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class EngineClient:
    """Asynchronous client of one router, or of one bare engine.

    Args:
        base_url: ``http://host:port`` of the router or engine.
        timeouts: Bounds of the waits.
        max_connections: Connections open at once, over all hosts; 0 for no limit.
    """

    def __init__(self, base_url: str, *, timeouts: ClientTimeouts | None = None, max_connections: int = 0) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeouts = timeouts or ClientTimeouts()
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._healthy: list[str] = []
        self._healthy_until = 0.0

    async def open(self) -> EngineClient:
        """Bind the client to the running loop."""
        self._loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=self._max_connections, limit_per_host=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,  # a system proxy between the trainer and its engines is never wanted
            json_serialize=lambda value: json.dumps(value, separators=(",", ":")),
        )
        return self

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> EngineClient:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self, payload: Mapping[str, Any], *, headers: Mapping[str, str] | None = None, base_url: str | None = None
    ) -> dict[str, Any]:
        """POST ``/generate`` and return the reply.

        Args:
            payload: Request of the engine's HTTP contract.
            headers: Further headers, such as the routing key.
            base_url: Send to this engine instead of the router.

        Raises:
            EngineError: The request was refused (4xx), or the reply is not one.
            WaitTimeoutError: No attempt succeeded within the bounds.
        """
        url = f"{base_url or self.base_url}/generate"
        reply = await self.request("POST", url, payload=payload, headers=headers)
        if not isinstance(reply, dict) or not isinstance(reply.get("meta_info"), dict):
            raise EngineError(f"POST {url} answered without meta_info: {str(reply)[:MAX_BODY_CHARS]}")
        return reply

    async def post(
        self, url: str, payload: Any, *, headers: Mapping[str, str] | None = None, max_attempts: int | None = None
    ) -> Any:
        """POST JSON to any URL; the reply is decoded JSON, or text when it is none."""
        return await self.request("POST", url, payload=payload, headers=headers, max_attempts=max_attempts)

    async def get(self, url: str) -> Any:
        """GET any URL once, bounded by ``control_seconds``."""
        return await self.request("GET", url, total_seconds=self.timeouts.control_seconds, max_attempts=1)

    async def request(
        self,
        method: str,
        url: str,
        *,
        payload: Any = None,
        headers: Mapping[str, str] | None = None,
        total_seconds: float | None = None,
        max_attempts: int | None = None,
    ) -> Any:
        """Send one request, with retries of transient faults.

        Args:
            method: ``GET`` or ``POST``.
            url: Full URL.
            payload: JSON body; None for no body.
            headers: Further headers.
            total_seconds: Bound over all attempts; default ``request_seconds``.
            max_attempts: Most attempts; default ``max_retries + 1``.

        Returns:
            Decoded JSON; text when the body is not JSON; None for an empty body.

        Raises:
            EngineError: 4xx other than 408 and 429, at once and with the body.
            EngineError: The last of the attempts was answered with 408, 429 or 5xx.
            WaitTimeoutError: The last of the attempts got no answer.
        """
        total = self.timeouts.request_seconds if total_seconds is None else total_seconds
        attempts = self.timeouts.max_retries + 1 if max_attempts is None else max_attempts
        return await self._on_own_loop(self._request(method, url, payload, headers, total, attempts))

    async def _on_own_loop(self, coro: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            coro.close()
            raise RuntimeError("this EngineClient is not open; call `await client.open()` first")
        if asyncio.get_running_loop() is self._loop:
            return await coro
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self._loop))

    async def _request(
        self,
        method: str,
        url: str,
        payload: Any,
        headers: Mapping[str, str] | None,
        total_seconds: float,
        max_attempts: int,
    ) -> Any:
        started = time.monotonic()
        attempt = 0
        while True:
            attempt += 1
            left = started + total_seconds - time.monotonic()
            try:
                return await self._attempt(method, url, payload, headers, left)
            except _TransientFaultError as fault:
                pause = min(RETRY_PAUSE_SECONDS * 2 ** (attempt - 1), MAX_RETRY_PAUSE_SECONDS) * random.uniform(0.5, 1)
                waited = time.monotonic() - started
                if attempt >= max_attempts or waited + pause >= total_seconds:
                    # An engine that answers, however badly, is not a dead one.
                    kind = EngineError if fault.answered else WaitTimeoutError
                    raise kind(
                        f"the rollout process waited {waited:.1f} s for {method} {url} in {attempt} attempts; last "
                        f"fault: {fault}. See the log of that engine or router; --http-request-timeout-seconds and "
                        "--http-max-retries bound the wait"
                    ) from fault
                level = logging.WARNING if attempt == 1 else logging.DEBUG
                logger.log(level, "%s %s: %s; trying again in %.1f s", method, url, fault, pause)
            await asyncio.sleep(pause)

    async def _attempt(
        self, method: str, url: str, payload: Any, headers: Mapping[str, str] | None, total_seconds: float
    ) -> Any:
        if self._session is None:
            raise EngineError(f"{method} {url} after the rollout's client was closed")
        timeout = aiohttp.ClientTimeout(total=total_seconds, sock_connect=self.timeouts.connect_seconds)
        try:
            async with self._session.request(method, url, json=payload, headers=headers, timeout=timeout) as response:
                body = await response.read()
                status = response.status
        except TimeoutError as error:
            raise _TransientFaultError(f"no reply within {total_seconds:g} s") from error
        except aiohttp.InvalidURL as error:
            raise EngineError(f"{url} is not a URL") from error
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            raise _TransientFaultError(f"{type(error).__name__}: {error}") from error
        if status in (408, 429) or status >= 500:
            raise _TransientFaultError(f"HTTP {status}: {_excerpt(body)}", answered=True)
        if status >= 400:
            text = _excerpt(body)
            raise EngineRequestError(f"{method} {url} was refused with HTTP {status}: {text}", status=status)
        if not body:
            return None
        try:
            return json.loads(body)
        except ValueError:
            return body.decode(errors="replace")

    async def worker_urls(self) -> list[str]:
        """URLs of the engines behind the router; the base URL itself when it is a bare engine."""
        return [url for url, _ in await self._workers(self.timeouts.control_seconds)]

    async def healthy_worker_urls(self) -> list[str]:
        """The engines that take requests, in a stable order; asked anew every ``WORKERS_SECONDS``.

        Raises:
            EngineError: There are none.
        """
        now = time.monotonic()
        if now >= self._healthy_until:
            healthy = sorted(
                url for url, is_healthy in await self._workers(self.timeouts.control_seconds) if is_healthy
            )
            if not healthy:
                raise EngineError(f"router {self.base_url} knows no healthy engine")
            self._healthy, self._healthy_until = healthy, now + WORKERS_SECONDS
        return self._healthy

    async def _workers(self, total_seconds: float) -> list[tuple[str, bool]]:
        try:
            reply = await self._control("GET", f"{self.base_url}/workers", total_seconds=total_seconds)
        except EngineRequestError as error:
            if error.status in (404, 405):
                return [(self.base_url, True)]
            raise
        workers = reply.get("workers") if isinstance(reply, dict) else None
        if not isinstance(workers, list):
            raise EngineError(f"GET {self.base_url}/workers answered {str(reply)[:MAX_BODY_CHARS]}; expected 'workers'")
        return [(str(w["url"]).rstrip("/"), bool(w.get("is_healthy", True))) for w in workers]

    async def abort_all(self, *, timeout_seconds: float | None = None) -> None:
        """Abort every running request and wait until the engines are idle.

        It ends by itself in time: bound it here rather than cancel it, so that an engine is not left
        with half of a control request. An engine that cannot be reached has nothing to abort and is
        only logged.

        Args:
            timeout_seconds: Bound of all of it; default ``abort_seconds``.

        Raises:
            EngineError: The router does not say which engines there are.
            WaitTimeoutError: An engine still runs requests when the time is over.
        """
        bound = self.timeouts.abort_seconds if timeout_seconds is None else timeout_seconds
        give_up_at = time.monotonic() + bound
        urls = [url for url, _ in await self._workers(min(bound, self.timeouts.control_seconds))]
        # All of them to the end: an abort that goes on unseen would end requests of the next rollout.
        outcomes = await asyncio.gather(*(self._abort_worker(u, give_up_at) for u in urls), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _abort_worker(self, url: str, give_up_at: float) -> None:
        started = time.monotonic()
        resend_at, resend_pause = 0.0, FIRST_ABORT_RESEND_SECONDS
        pause = 0.05
        while True:
            now = time.monotonic()
            left = min(max(give_up_at - now, MIN_CONTROL_SECONDS), self.timeouts.control_seconds)
            try:
                if now >= resend_at:
                    await self._control("POST", f"{url}/abort_request", {"abort_all": True}, total_seconds=left)
                    # Again: a request that was on its way may have arrived after the abort.
                    resend_at = now + resend_pause
                    resend_pause = min(2 * resend_pause, MAX_ABORT_RESEND_SECONDS)
                loads = await self._control("GET", f"{url}/v1/loads?include=core", total_seconds=left)
                running = _num_requests(loads)
            except EngineRequestError as error:
                if error.status in (404, 405):  # an engine without load report: its replies tell
                    return
                raise
            except (EngineError, WaitTimeoutError) as error:
                logger.warning("abort: engine %s does not answer: %s", url, error)
                return
            if running == 0:
                return
            if now > give_up_at:
                raise WaitTimeoutError(
                    f"the rollout process waited {now - started:.1f} s for engine {url} to abort; "
                    f"{running} requests still run there (--abort-timeout-seconds)"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _control(self, method: str, url: str, payload: Any = None, *, total_seconds: float) -> Any:
        return await self.request(method, url, payload=payload, total_seconds=total_seconds, max_attempts=1)


def _excerpt(body: bytes) -> str:
    return body[:MAX_BODY_CHARS].decode(errors="replace")


def _num_requests(reply: Any) -> int:
    """Running plus waiting requests in a reply of ``/v1/loads``; 0 when it reports none."""
    loads = reply.get("loads") if isinstance(reply, dict) else reply
    if not isinstance(loads, list):
        return 0
    total = 0
    for load in loads:
        if isinstance(load, dict):
            total += int(load.get("num_running_reqs") or 0) + int(load.get("num_waiting_reqs") or 0)
    return total
