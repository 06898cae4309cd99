"""How far a rollout or an evaluation is, for whoever draws it.

The process that generates has no terminal, so it only states its progress here; the one with the
terminal asks for the newest statement. Tests hold that a statement is never seen half written.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSnapshot:
    """What is known of the work in progress.

    Args:
        label: What is being done, such as ``rollout 3``; another label is other work.
        done: Units finished.
        total: Units wanted.
        unit: Name of the units, plural.
        note: Further text, such as the mean reward; empty for none.
        sequence: Grows with every statement: an equal number means nothing new.
    """

    label: str
    done: int
    total: int
    unit: str
    note: str
    sequence: int


class ProgressSink(Protocol):
    """Takes statements of progress; from any thread, and quickly."""

    def report(self, label: str, done: int, total: int, *, unit: str, note: str = "") -> None:
        """State that ``done`` of ``total`` units of ``label`` are finished."""
        ...


class ProgressBoard:
    """Keeps the newest statement; reporting and reading may happen in different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: ProgressSnapshot | None = None
        self._sequence = 0

    def report(self, label: str, done: int, total: int, *, unit: str, note: str = "") -> None:
        """Replace the newest statement; see ``ProgressSnapshot``."""
        with self._lock:
            self._sequence += 1
            self._newest = ProgressSnapshot(
                label=label, done=done, total=total, unit=unit, note=note, sequence=self._sequence
            )

    def snapshot(self) -> ProgressSnapshot | None:
        """The newest statement; None before the first."""
        with self._lock:
            return self._newest
