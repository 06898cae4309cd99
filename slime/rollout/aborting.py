"""Ending every request of one engine, and knowing when it is idle."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from slime.errors import EngineError, WaitTimeoutError
from slime.rollout.faults import EngineRequestError
from slime.rollout.workers import Control

logger = logging.getLogger(__name__)

FIRST_ABORT_RESEND_SECONDS = 0.25
MAX_ABORT_RESEND_SECONDS = 3.0
MIN_CONTROL_SECONDS = 1.0


async def abort_worker(control: Control, url: str, give_up_at: float, control_seconds: float) -> None:
    """End the requests of the engine at ``url`` until none is left; one that cannot be reached has none.

    Args:
        control: Sends one control request: method, URL, payload, bound in seconds.
        url: The engine.
        give_up_at: When to give up, on the monotonic clock.
        control_seconds: Bound of one control request.

    Raises:
        WaitTimeoutError: It still runs requests when the time is over.
    """
    started = time.monotonic()
    resend_at, resend_pause = 0.0, FIRST_ABORT_RESEND_SECONDS
    pause = 0.05
    while True:
        now = time.monotonic()
        left = min(max(give_up_at - now, MIN_CONTROL_SECONDS), control_seconds)
        try:
            if now >= resend_at:
                await control("POST", f"{url}/abort_request", {"abort_all": True}, left)
                # Again: a request that was on its way may have arrived after the abort.
                resend_at = now + resend_pause
                resend_pause = min(2 * resend_pause, MAX_ABORT_RESEND_SECONDS)
            loads = await control("GET", f"{url}/v1/loads?include=core", None, left)
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
