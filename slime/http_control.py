"""Blocking JSON requests to engines and the router: control, not samples.

Owns the translation of what can go wrong into our errors. Proxies of the environment are ignored.
Tests hold: an error status carries its body, no whole answer in time is a ``WaitTimeoutError``, and an answer that is
garbage or breaks off is an ``EngineError``.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slime.errors import EngineError, WaitTimeoutError
from slime.http_deadline import bounded_opener

T = TypeVar("T")

_BODY_CHARACTERS = 500
_MAX_CONNECTIONS = 32


class HttpStatusError(EngineError):
    """The answer was an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status)


def request(
    url: str, payload: Any = None, *, timeout_seconds: float, waiter: str = "the driver", method: str | None = None
) -> Any:
    """Send one request.

    Args:
        url: Address.
        payload: JSON body; a request without one is a GET.
        timeout_seconds: Limit on the whole reply.
        waiter: Who waits, for messages.
        method: Overrides the method.

    Returns:
        The decoded JSON reply, or its text when it is not JSON; None for an empty one.

    Raises:
        HttpStatusError: The answer is an error; with its body.
        EngineError: Not reachable, or the answer is no HTTP or breaks off.
        WaitTimeoutError: No answer in time.
    """
    body = None if payload is None else json.dumps(payload).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    message = urllib.request.Request(url, data=body, headers=headers, method=method)
    try:
        with bounded_opener().open(message, timeout=timeout_seconds) as reply:
            content: bytes = reply.read()
    except urllib.error.HTTPError as error:
        raise HttpStatusError(f"{url} answered {error.code}: {_text_of(error)}", error.code) from None
    except OSError as error:  # URLError is one
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            raise WaitTimeoutError(f"{waiter} waited {timeout_seconds:.0f} s for {url} to answer") from None
        raise EngineError(f"{url} cannot be reached: {reason}") from None
    except http.client.HTTPException as error:
        raise EngineError(f"{url} gave no whole HTTP answer: {type(error).__name__}: {error}") from None
    text = content.decode("utf-8", errors="replace")
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text


def _text_of(error: urllib.error.HTTPError) -> str:
    """What an error status comes with; its status counts also when that breaks off."""
    try:
        return error.read().decode("utf-8", errors="replace")[:_BODY_CHARACTERS]
    except (OSError, http.client.HTTPException) as broken:
        return f"(its text broke off: {type(broken).__name__})"


def in_parallel(function: Callable[[str], T], urls: Sequence[str]) -> list[T]:
    """``function`` of every address at the same time, results in order; the first error is raised."""
    if len(urls) < 2:
        return [function(url) for url in urls]
    with ThreadPoolExecutor(max_workers=min(len(urls), _MAX_CONNECTIONS), thread_name_prefix="control") as pool:
        return list(pool.map(function, urls))
