"""One way of writing log lines in every process.

Owns the format and the destinations; levels of single modules stay with the standard library.
Tests hold: configuring twice leaves one handler.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any, TextIO

# Their INFO lines are about their own insides.
_QUIET = ("megatron", "matplotlib", "PIL", "urllib3", "httpx", "asyncio")
_FORMAT = "%(asctime)s {prefix}%(filename)s:%(lineno)d - %(message)s"


class _SlimeHandler(logging.StreamHandler[TextIO]):
    """Marks the handlers that this module installed, so that a second call replaces them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; on a terminal, progress bars step aside for it."""
        if not self.stream.isatty():
            super().emit(record)
            return
        tqdm: Any = importlib.import_module("tqdm")
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def configure_logger(
    prefix: str = "", *, level: int = logging.INFO, stream: TextIO | None = None, warnings_to: TextIO | None = None
) -> None:
    """Send log lines of this process to one stream; calling again replaces the earlier setting.

    Args:
        prefix: Put before file and line, for example ``"[rank 0]"``.
        level: Lowest level written.
        stream: Destination; standard error when None.
        warnings_to: A second destination that gets warnings and errors only. Worker processes
            write to a file and pass the operator's terminal here.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _SlimeHandler)]:
        root.removeHandler(handler)
    formatter = logging.Formatter(_FORMAT.format(prefix=f"{prefix} " if prefix else ""))
    destinations = [(stream or sys.stderr, level)]
    if warnings_to is not None:
        destinations.append((warnings_to, logging.WARNING))
    for destination, lowest in destinations:
        handler = _SlimeHandler(destination)
        handler.setFormatter(formatter)
        handler.setLevel(lowest)
        root.addHandler(handler)
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def tail(path: Path, num_lines: int = 20, max_bytes: int = 32768) -> str:
    """Last lines of a log file, for error messages; a note when there is none.

    Args:
        path: The file.
        num_lines: How many lines at most.
        max_bytes: How much of the end of the file is read.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - max_bytes))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(lines[-num_lines:]) if lines else "(the log is empty)"
