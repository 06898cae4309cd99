"""Progress of a rollout: stated to a sink at every step, and in the log now and then.

Owns the running mean reward and the log lines; drawing is the business of whoever reads the sink.
Tests hold that both show count, target and mean reward, and that lines come at most every
``LINE_SECONDS``.
"""

from __future__ import annotations

import logging
import time

from slime.observability.progress import ProgressSink

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0


class Progress:
    """Count and mean reward of one rollout or evaluation; a context manager.

    Args:
        sink: Told of every step.
        label: What is counted.
        target: Units to come.
        unit: Name of the units, plural.
    """

    def __init__(self, sink: ProgressSink, label: str, target: int, unit: str) -> None:
        self._sink = sink
        self._label, self._target, self._unit = label, target, unit
        self._done = 0
        self._reward_sum, self._num_rewards = 0.0, 0
        self._started = self._last_line = time.monotonic()

    def update(self, count: int, rewards: list[float]) -> None:
        """Add ``count`` finished units and their rewards."""
        self._done += count
        self._reward_sum += sum(rewards)
        self._num_rewards += len(rewards)
        self._state()
        if time.monotonic() - self._last_line >= LINE_SECONDS:
            self._write_line()

    @property
    def _mean_reward(self) -> str:
        return f"{self._reward_sum / self._num_rewards:.3f}" if self._num_rewards else "-"

    def _state(self) -> None:
        note = f"reward {self._mean_reward}"
        self._sink.report(self._label, self._done, self._target, unit=self._unit, note=note)

    def _write_line(self) -> None:
        self._last_line = now = time.monotonic()
        logger.info(
            "%s: %d/%d %s, mean reward %s, %.1f s",
            *(self._label, self._done, self._target, self._unit, self._mean_reward, now - self._started),
        )

    def __enter__(self) -> Progress:
        self._state()
        return self

    def __exit__(self, *_: object) -> None:
        self._write_line()
