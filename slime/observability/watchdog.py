"""Waits that end, and a report of who waited for what when they do not.

Owns the wording of an expired wait and the stack dump of this process. Tests hold: an expired
wait names both sides and the limit, and the dump shows every thread.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TextIO

from slime.errors import WaitTimeoutError

logger = logging.getLogger(__name__)


def format_stacks() -> str:
    """The current stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        parts.append(f"thread {names.get(ident, '?')} ({ident}):\n" + "".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(parts)


def dump_stacks_on_signal(signum: int, file: TextIO) -> None:
    """Write all stacks of this process to ``file`` whenever ``signum`` arrives, even inside C code."""
    faulthandler.register(signum, file=file, all_threads=True, chain=False)


def expired(*, waiter: str, waited_for: str, timeout_seconds: float, details: str = "") -> WaitTimeoutError:
    """The error of a wait that ran out, after logging where this process stands."""
    message = f"{waiter} waited {timeout_seconds:.0f} s for {waited_for}, and the wait expired"
    logger.error("%s; stacks of this process:\n%s", message, format_stacks())
    return WaitTimeoutError(f"{message}\n{details}" if details else message)


def wait_until(
    condition: Callable[[], bool], *, waiter: str, waited_for: str, timeout_seconds: float, poll_seconds: float = 0.05
) -> None:
    """Poll until ``condition`` holds.

    Args:
        condition: Cheap test; exceptions pass through.
        waiter: Who waits, for the report.
        waited_for: What for, for the report.
        timeout_seconds: Limit.
        poll_seconds: Pause between two tests.

    Raises:
        WaitTimeoutError: The limit passed first.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise expired(waiter=waiter, waited_for=waited_for, timeout_seconds=timeout_seconds)
        time.sleep(poll_seconds)
