"""Established functions that plug-ins call without a handle.

``run``, ``post``, ``get`` and ``init_http_client`` come from an interface in which loop and
connections were global. Here they use those of the rollout that is running around the caller, and
work on their own for the length of one call elsewhere. Tests hold both.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from slime.plugins import load_plugin
from slime.rollout.client import EngineClient
from slime.rollout.context import RolloutContext, router_url
from slime.rollout.loop import LoopThread

T = TypeVar("T")


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the rollout's loop and block for its result.

    Outside a rollout it runs on a loop of its own, which ends with it.

    Raises:
        RuntimeError: Called on the rollout's loop itself; ``await`` there.
    """
    context = RolloutContext.active()
    if context is not None:
        return context.run(coro)
    loop_thread = LoopThread("slime-run")
    try:
        return loop_thread.run(coro)
    finally:
        loop_thread.close()


def get_async_loop() -> LoopThread:
    """The loop thread of the running rollout; its ``run`` blocks for a result.

    Raises:
        RuntimeError: No rollout is running around the caller.
    """
    context = RolloutContext.active()
    if context is None:
        raise RuntimeError("no rollout is running here; its loop exists only while a rollout function runs")
    return context.loop_thread


async def post(url: str, payload: Any = None, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """POST JSON to any URL.

    Args:
        url: Full URL.
        payload: JSON body; an empty object when there is none.
        max_retries: Most attempts, for transient faults only.
        headers: Further headers.

    Returns:
        Decoded JSON, or the text when the reply is not JSON.

    Raises:
        EngineError: Refused (4xx, at once), or answered with 5xx to the last.
        WaitTimeoutError: No answer within the bounds.
    """
    context = RolloutContext.active()
    body = payload if payload is not None else {}
    if context is not None:
        return await context.client.post(url, body, headers=headers, max_attempts=max_retries)
    async with EngineClient(url) as client:
        return await client.post(url, body, headers=headers, max_attempts=max_retries)


async def get(url: str) -> Any:
    """GET any URL once and decode the JSON."""
    context = RolloutContext.active()
    if context is not None:
        return await context.client.get(url)
    async with EngineClient(url) as client:
        return await client.get(url)


def init_http_client(args: Any) -> None:
    """Accepted for compatibility: the connections of a rollout are opened with its handle.

    Args:
        args: Not read.
    """


def get_rollout_num_engines(args: Any) -> int:
    """Number of engines the rollout generates with."""
    return args.rollout_num_engines


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """URL of an endpoint of a named model's router; the default router when the name has none of its own.

    Args:
        args: Flat arguments; the fact ``model_router_urls`` maps names to base URLs.
        model_name: Name of the model in ``--sglang-config``.
        endpoint: Path to append.
    """
    routers: Mapping[str, str] = args.model_router_urls if "model_router_urls" in args else {}
    return routers.get(model_name, router_url(args)).rstrip("/") + endpoint


def load_function(path: str) -> Any:
    """Load a function or class from ``pkg.module.attr``, ``pkg.module:attr`` or ``file.py:attr``.

    Raises:
        PluginError: It cannot be loaded.
    """
    return load_plugin(path, flag="load_function", kind="other")
