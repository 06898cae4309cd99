"""Brings progress from the processes that work to the operator's terminal.

The rollout process keeps the board, because it can answer while it works; trainer rank 0 reports
there. A thread of the driver reads the board and draws it. Progress never fails or delays a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from slime.observability.display import Display

POLL_SECONDS = 0.25
REPORT_SECONDS = 0.2
_ANSWER_SECONDS = 5.0
_JOIN_SECONDS = 1.0


class ProgressReports:
    """What a working process calls: tells the board at most every ``REPORT_SECONDS``, without waiting."""

    def __init__(self, board: Any) -> None:
        """Report to the actor ``board``, which has ``show_progress``."""
        self._board = board
        self._last = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        """Say how far ``label`` is; its end is always told."""
        now = time.monotonic()
        if done < total and now - self._last < REPORT_SECONDS:
            return
        self._last = now
        self._board.show_progress.remote(label, done, total)


@contextmanager
def shown(board: Any, display: Display) -> Generator[None]:
    """Draw what the actor ``board`` has in ``progress`` as long as the block runs."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(board, display, ended), name="slime-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=_JOIN_SECONDS)


def _follow(board: Any, display: Display, ended: threading.Event) -> None:
    try:
        while not ended.wait(POLL_SECONDS):
            answer = board.progress.remote()
            deadline = time.monotonic() + _ANSWER_SECONDS
            while not ended.is_set() and time.monotonic() < deadline:
                if ray.wait([answer], timeout=POLL_SECONDS)[0]:
                    display.show(ray.get(answer))
                    break
    except RayError:  # the process is gone; whoever waits for its work says so
        pass
    finally:
        display.close()
