"""Named durations that end up as ``perf/{name}_time``.

Owns accumulation between two reports. Tests hold: nested and repeated timers add up, and a timer
started twice or ended unstarted is an error.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class Timer:
    """Accumulates seconds per name until ``reset``."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Begin timing ``name``; it must not be running."""
        assert name not in self._started, f"timer {name} is already running"
        self._started[name] = time.monotonic()

    def end(self, name: str) -> float:
        """Stop timing ``name`` and return the seconds of this stretch."""
        assert name in self._started, f"timer {name} is not running"
        seconds = time.monotonic() - self._started.pop(name)
        self.add(name, seconds)
        return seconds

    def add(self, name: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def reset(self) -> None:
        """Forget the accumulated durations; running timers go on."""
        self._seconds.clear()

    def perf_metrics(self) -> dict[str, float]:
        """The durations under their metric names."""
        return {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}

    @contextmanager
    def context(self, name: str) -> Generator[None]:
        """Time the block under ``name``."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)
