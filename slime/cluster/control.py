"""Blocking control requests to engines and the router."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slime.errors import EngineError, WaitTimeoutError

T = TypeVar("T")

_BODY_CHARACTERS = 500


def request(url: str, payload: Any = None, *, timeout_seconds: float, method: str | None = None) -> Any:
    """Send one request; proxies of the environment are ignored.

    Args:
        url: Address.
        payload: JSON body; a request without one is a GET.
        timeout_seconds: Limit on the whole reply.
        method: Overrides the method.

    Returns:
        The decoded JSON reply, or its text when it is not JSON.

    Raises:
        EngineError: Not reachable, or the answer is an error; with the answer's body.
        WaitTimeoutError: No answer in time.
    """
    body = None if payload is None else json.dumps(payload).encode()
    message = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json"} if body else {}, method=method
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(message, timeout=timeout_seconds) as reply:
            text = reply.read().decode("utf-8", errors="replace")
    except urllib.error.HTTPError as error:
        detail = error.read().decode("utf-8", errors="replace")[:_BODY_CHARACTERS]
        raise EngineError(f"{url} answered {error.code}: {detail}") from None
    except TimeoutError:
        raise WaitTimeoutError(f"the driver waited {timeout_seconds:.0f} s for {url} to answer") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise WaitTimeoutError(f"the driver waited {timeout_seconds:.0f} s for {url} to answer") from None
        raise EngineError(f"{url} cannot be reached: {error.reason}") from None
    except OSError as error:
        raise EngineError(f"{url} broke the connection: {error}") from None
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text


def in_parallel(function: Callable[[str], T], urls: Sequence[str]) -> list[T]:
    """``function`` of every address at the same time, results in order; the first error is raised."""
    if not urls:
        return []
    with ThreadPoolExecutor(max_workers=min(len(urls), 32), thread_name_prefix="control") as pool:
        return list(pool.map(function, urls))
