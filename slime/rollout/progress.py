"""Progress of a rollout: a bar on a terminal, a line now and then elsewhere.

Owns nothing but the display. Tests hold that both forms show count, target and mean reward, and
that lines come at most every ``LINE_SECONDS``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Protocol

from tqdm import tqdm

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0


class Progress(Protocol):
    """Display of one rollout; a context manager."""

    def update(self, count: int, rewards: list[float]) -> None:
        """Add ``count`` finished units and their rewards."""
        ...

    def __enter__(self) -> Progress: ...

    def __exit__(self, *_: object) -> None: ...


ProgressFactory = Callable[[str, int, str], Progress]
"""``(title, target, unit) -> Progress``."""


def open_progress(title: str, target: int, unit: str) -> Progress:
    """A bar when standard error is a terminal, else lines."""
    kind = BarProgress if sys.stderr.isatty() else LineProgress
    return kind(title, target, unit)


class MeanReward:
    """Running mean of the rewards seen."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def add(self, rewards: list[float]) -> None:
        """Take further rewards in."""
        self._sum += sum(rewards)
        self._count += len(rewards)

    def __str__(self) -> str:
        return f"{self._sum / self._count:.3f}" if self._count else "-"


class BarProgress:
    """A tqdm bar with the running mean reward.

    Args:
        title: What is counted, shown in front.
        target: Units to come.
        unit: Name of one unit.
    """

    def __init__(self, title: str, target: int, unit: str) -> None:
        self._bar = tqdm(total=target, desc=title, unit=unit, dynamic_ncols=True, file=sys.stderr)
        self._mean = MeanReward()

    def update(self, count: int, rewards: list[float]) -> None:
        """Advance the bar."""
        self._mean.add(rewards)
        self._bar.set_postfix_str(f"reward {self._mean}", refresh=False)
        self._bar.update(count)

    def __enter__(self) -> BarProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class LineProgress:
    """Log lines: one at most every ``LINE_SECONDS``, and one at the end.

    Args:
        title: What is counted, shown in front.
        target: Units to come.
        unit: Name of one unit.
    """

    def __init__(self, title: str, target: int, unit: str) -> None:
        self._title, self._target, self._unit = title, target, unit
        self._count = 0
        self._mean = MeanReward()
        self._started = self._last_line = time.monotonic()

    def update(self, count: int, rewards: list[float]) -> None:
        """Count, and write a line if the last one is old enough."""
        self._count += count
        self._mean.add(rewards)
        if time.monotonic() - self._last_line >= LINE_SECONDS:
            self._write()

    def _write(self) -> None:
        self._last_line = now = time.monotonic()
        logger.info(
            "%s: %d/%d %s, mean reward %s, %.1f s",
            *(self._title, self._count, self._target, self._unit, self._mean, now - self._started),
        )

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
