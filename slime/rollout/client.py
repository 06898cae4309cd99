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
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from slime.errors import EngineError, WaitTimeoutError
from slime.rollout.aborting import abort_worker
from slime.rollout.faults import BadReplyError, EngineRequestError, TransientFaultError
from slime.rollout.reissue import Reissues
from slime.rollout.workers import WorkerDirectory

__all__ = ["BadReplyError", "ClientTimeouts", "EngineClient", "EngineRequestError"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BODY_CHARS = 500
RETRY_PAUSE_SECONDS = 0.25
MAX_RETRY_PAUSE_SECONDS = 10.0
BUSY_STATUSES = (429, 503)
ROUTER_ERROR_HEADER = "x-smg-error-code"


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


class EngineClient:
    """Asynchronous client of one router, or of one bare engine.

    Args:
        base_url: ``http://host:port`` of the router or engine.
        timeouts: Bounds of the waits.
        max_connections: Connections open at once, over all hosts; 0 for no limit.
        reissues: With it, a request that got no answer of use goes to another engine, and a component that is being
            replaced is waited for; without it, an attempt counts whatever it failed of.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeouts: ClientTimeouts | None = None,
        max_connections: int = 0,
        reissues: Reissues | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeouts = timeouts or ClientTimeouts()
        self.reissues = reissues
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = WorkerDirectory(self.base_url, self._control, self.timeouts.control_seconds)

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
        return await self.generate_and_read(payload, lambda reply: reply, headers=headers, base_url=base_url)

    async def generate_and_read(
        self,
        payload: Mapping[str, Any],
        read: Callable[[dict[str, Any]], T],
        *,
        headers: Mapping[str, str] | None = None,
        base_url: str | None = None,
    ) -> T:
        """POST ``/generate`` and return what ``read`` makes of the reply.

        Args:
            payload: Request of the engine's HTTP contract.
            read: Raises ``BadReplyError`` for a reply that does not fit together: another engine is asked then, if
                the client issues requests again.
            headers: Further headers, such as the routing key.
            base_url: Send to this engine instead of the router.

        Raises:
            EngineError: The request was refused (4xx), or there is no reply that can be read.
            WaitTimeoutError: No attempt succeeded within the bounds.
        """
        if self.reissues is not None:
            return await self._on_own_loop(self._generate_anywhere(self.reissues, payload, read, headers, base_url))
        url = f"{base_url or self.base_url}/generate"
        return _read(url, await self.request("POST", url, payload=payload, headers=headers), read)

    async def _generate_anywhere(
        self,
        reissues: Reissues,
        payload: Mapping[str, Any],
        read: Callable[[dict[str, Any]], T],
        headers: Mapping[str, str] | None,
        base_url: str | None,
    ) -> T:
        request, tried = reissues.new_request(), list[str]()

        async def attempt(seconds: float) -> T:
            target = await self._another_engine(reissues, tried) if tried else base_url or self.base_url
            reissues.count += bool(tried)
            tried.append(target)
            url = f"{target}/generate"
            try:
                value = _read(url, await self._attempt("POST", url, payload, headers, seconds), read)
            except (TransientFaultError, BadReplyError) as error:
                bad = isinstance(error, BadReplyError)
                fault = TransientFaultError(str(error), answered=True, by_engine=True) if bad else error
                self._workers.doubt()
                if target != self.base_url and not fault.busy:
                    reissues.bad(target, request, str(fault))
                raise fault from error
            reissues.good(target)
            return value

        what, timeouts = f"POST {base_url or self.base_url}/generate", self.timeouts
        return await self._repeat(attempt, what, timeouts.request_seconds, timeouts.max_retries + 1, patient=True)

    async def _another_engine(self, reissues: Reissues, tried: list[str]) -> str:
        """Where a request goes next: straight to an engine, so that its answer tells about that one.

        Through the router again if that is the way it must go, or if the router cannot say which engines there are.
        """
        try:
            engines = await self.healthy_worker_urls()
        except (EngineError, WaitTimeoutError):
            return self.base_url
        return reissues.choose(engines, tried) if self._workers.serve_alone else self.base_url

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
        async def attempt(seconds: float) -> Any:
            return await self._attempt(method, url, payload, headers, seconds)

        patient = self.reissues is not None and max_attempts > 1 and self._workers.knows(url)
        return await self._repeat(attempt, f"{method} {url}", total_seconds, max_attempts, patient=patient)

    async def _repeat(
        self,
        attempt: Callable[[float], Awaitable[T]],
        what: str,
        total_seconds: float,
        max_attempts: int,
        *,
        patient: bool,
    ) -> T:
        """Repeat ``attempt``, which is given the seconds left, while its faults are transient.

        A patient wait counts only what an engine answered: what is being replaced answers nothing for a while, and
        time bounds that.
        """
        started = time.monotonic()
        attempts = counted = 0
        while True:
            attempts += 1
            left = started + total_seconds - time.monotonic()
            try:
                return await attempt(left)
            except TransientFaultError as fault:
                counted += fault.by_engine or not patient
                pause = min(RETRY_PAUSE_SECONDS * 2 ** min(attempts - 1, 10), MAX_RETRY_PAUSE_SECONDS)
                pause *= random.uniform(0.5, 1)
                waited = time.monotonic() - started
                if counted >= max_attempts or waited + pause >= total_seconds:
                    # An engine that answers, however badly, is not a dead one.
                    kind = EngineError if fault.answered else WaitTimeoutError
                    raise kind(
                        f"the rollout process waited {waited:.1f} s for {what} in {attempts} attempts; last "
                        f"fault: {fault}. See the log of that engine or router; --http-request-timeout-seconds and "
                        "--http-max-retries bound the wait"
                    ) from fault
                warn = attempts == 1 if self.reissues is None else self.reissues.should_warn()
                level = logging.WARNING if warn else logging.DEBUG
                logger.log(level, "%s: %s; trying again in %.1f s", what, fault, pause)
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
                status, by_router = response.status, ROUTER_ERROR_HEADER in response.headers
        except TimeoutError as error:
            raise TransientFaultError(f"no reply within {total_seconds:g} s") from error
        except aiohttp.InvalidURL as error:
            raise EngineError(f"{url} is not a URL") from error
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            raise TransientFaultError(f"{type(error).__name__}: {error}") from error
        if status in (408, 429) or status >= 500:
            raise TransientFaultError(
                f"HTTP {status}: {_excerpt(body)}",
                answered=True,
                by_engine=not by_router,
                busy=status in BUSY_STATUSES,
            )
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
        return [worker.url for worker in await self._workers.all()]

    async def healthy_worker_urls(self) -> list[str]:
        """The engines that take requests, in a stable order; those that answer badly are left out.

        Raises:
            EngineError: There are none.
        """
        if self.reissues is None:
            return await self._workers.healthy()
        try:
            healthy = await self._workers.healthy()
        except (EngineError, WaitTimeoutError):
            healthy = self._workers.healthy_urls  # a router that is being replaced, or all of its engines are
            if not healthy:
                raise
        return self.reissues.trusted(healthy)

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
        urls = [worker.url for worker in await self._workers.all(bound)]
        # All of them to the end: an abort that goes on unseen would end requests of the next rollout.
        outcomes = await asyncio.gather(
            *(abort_worker(self._control, url, give_up_at, self.timeouts.control_seconds) for url in urls),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _control(self, method: str, url: str, payload: Any, total_seconds: float) -> Any:
        return await self.request(method, url, payload=payload, total_seconds=total_seconds, max_attempts=1)


def _read(url: str, reply: Any, read: Callable[[dict[str, Any]], T]) -> T:
    if not isinstance(reply, dict) or not isinstance(reply.get("meta_info"), dict):
        raise BadReplyError(f"POST {url} answered without meta_info: {str(reply)[:MAX_BODY_CHARS]}")
    return read(reply)


def _excerpt(body: bytes) -> str:
    return body[:MAX_BODY_CHARS].decode(errors="replace")
