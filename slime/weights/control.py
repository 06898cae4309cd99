"""Requests to engines during one weight update: all under one deadline, every failure with the engine's name."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from slime.engines.features import ask_server_info
from slime.errors import EngineError, WaitTimeoutError
from slime.http_control import HttpStatusError, request
from slime.weights.endpoint import EngineEndpoint

T = TypeVar("T")

_WORK_SHARE = 0.8
_GRACE_SHARE = 0.05
_MAX_CONNECTIONS = 32


class Deadline:
    """The time of one update; what works on it keeps some back for taking a failed one back.

    Args:
        timeout_seconds: The whole time, after which the driver gives up; it starts with ``restart``.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.restart()

    def restart(self) -> None:
        """Begin to count the time of the next update."""
        self._end = time.monotonic() + self.timeout_seconds * _WORK_SHARE

    @property
    def grace_seconds(self) -> float:
        """Time that a late step still gets, so that it fails by name."""
        return self.timeout_seconds * _GRACE_SHARE

    @property
    def seconds_left(self) -> float:
        """For work; never less than the grace."""
        return max(self._end - time.monotonic(), self.grace_seconds)


@contextmanager
def naming(endpoint: EngineEndpoint) -> Generator[None]:
    """Put the name of the engine in front of what a request to it raises."""
    try:
        yield
    except HttpStatusError as error:
        raise HttpStatusError(f"{endpoint.name}: {error}", error.status) from None
    except WaitTimeoutError as error:
        raise WaitTimeoutError(f"{endpoint.name}: {error}") from None
    except EngineError as error:
        raise EngineError(f"{endpoint.name}: {error}") from None


class EngineCalls:
    """Requests to a fixed set of engines.

    Args:
        endpoints: The engines.
        deadline: Of the update that they belong to.
    """

    def __init__(self, endpoints: Sequence[EngineEndpoint], deadline: Deadline) -> None:
        self.endpoints = tuple(endpoints)
        self.deadline = deadline

    def call(
        self,
        endpoint: EngineEndpoint,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Send one request; without a body it is a GET.

        Args:
            endpoint: The engine.
            path: Route and query.
            body: JSON object.
            timeout_seconds: Bound of its own, instead of what is left until the deadline.

        Returns:
            The decoded answer.

        Raises:
            HttpStatusError: The answer is an error status.
            EngineError: The engine cannot be reached.
            WaitTimeoutError: No answer in time.
        """
        seconds = self.deadline.seconds_left if timeout_seconds is None else timeout_seconds
        with naming(endpoint):
            return request(endpoint.url + path, body, timeout_seconds=seconds, waiter="the trainer")

    def server_info(self, endpoint: EngineEndpoint) -> dict[str, Any]:
        """What an engine says of itself; raises as ``call``."""
        with naming(endpoint):
            return ask_server_info(endpoint.url, timeout_seconds=self.deadline.seconds_left, waiter="the trainer")

    def each(self, function: Callable[[EngineEndpoint], T]) -> list[T]:
        """``function`` of every engine at the same time, results in order; the first error is raised."""
        if len(self.endpoints) < 2:
            return [function(endpoint) for endpoint in self.endpoints]
        workers = min(len(self.endpoints), _MAX_CONNECTIONS)
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="weights") as pool:
            return list(pool.map(function, self.endpoints))

    def to_all(self, path: str, body: Mapping[str, Any] | None) -> list[tuple[EngineEndpoint, Any]]:
        """The same request to every engine; (engine, answer) pairs."""
        return list(zip(self.endpoints, self.each(lambda e: self.call(e, path, body)), strict=True))
