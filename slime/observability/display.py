"""Progress for the operator: bars on a terminal, a line now and then elsewhere.

Owns drawing only; it is told what is in progress. Tests hold: a bar appears on a terminal and goes
with its work, and lines come at most every ``LINE_SECONDS`` per piece of work.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO

from slime.observability.progress import ProgressSnapshot

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0


class Display(Protocol):
    """Shows what is in progress."""

    def show(self, current: Iterable[ProgressSnapshot]) -> None:
        """Take in everything in progress now; what is missing has ended."""
        ...

    def close(self) -> None:
        """Remove what is shown."""
        ...


def open_display(stream: TextIO | None = None) -> Display:
    """Bars if ``stream`` (standard error by default) is a terminal, else lines."""
    target: TextIO = stream or sys.stderr
    return BarDisplay(target) if target.isatty() else LineDisplay()


class BarDisplay:
    """A tqdm bar per piece of work, below the bar of the whole run."""

    def __init__(self, stream: TextIO) -> None:
        tqdm: Any = importlib.import_module("tqdm")
        self._tqdm = tqdm.tqdm
        self._stream = stream
        self._bars: dict[str, Any] = {}

    def show(self, current: Iterable[ProgressSnapshot]) -> None:
        """See ``Display.show``."""
        entries = {entry.label: entry for entry in current}
        for label in [label for label in self._bars if label not in entries]:
            self._bars.pop(label).close()
        for label, entry in entries.items():
            if label not in self._bars:
                self._bars[label] = self._tqdm(
                    total=entry.total,
                    desc=label,
                    unit=f" {entry.unit}",
                    file=self._stream,
                    dynamic_ncols=True,
                    leave=False,
                )
            bar = self._bars[label]
            bar.total, bar.n = entry.total, entry.done
            bar.set_postfix_str(entry.note, refresh=False)
            bar.refresh()

    def close(self) -> None:
        """See ``Display.close``."""
        self.show(())


class LineDisplay:
    """Log lines: the first one when a piece of work has taken ``LINE_SECONDS``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def show(self, current: Iterable[ProgressSnapshot]) -> None:
        """See ``Display.show``."""
        now = self._clock()
        entries = {entry.label: entry for entry in current}
        self._last = {label: self._last.get(label, now) for label in entries}
        for label, entry in entries.items():
            if now - self._last[label] >= LINE_SECONDS:
                self._last[label] = now
                note = f", {entry.note}" if entry.note else ""
                logger.info("%s: %d/%d %s%s", label, entry.done, entry.total, entry.unit, note)

    def close(self) -> None:
        """See ``Display.close``."""
