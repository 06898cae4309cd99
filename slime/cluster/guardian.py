"""Ends every process of a run, whatever became of the driver.

Owns the mark (an environment variable that every process started by the driver inherits, also
through Ray's daemons) and the sweep over marked processes. The guardian is a small process of its
own session that waits for the driver's end of a pipe to close, which also happens when the driver
is killed. Standard library only: it starts in milliseconds and cannot break with the rest.
Tests hold: after a killed driver nothing marked is alive, and the scratch directory is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK_VARIABLE = "SLIME_RUN_MARK"
_POLL_SECONDS = 0.05


def new_mark() -> str:
    """A mark no other run has."""
    return f"slime-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _state_and_parent(pid: int) -> tuple[str, int]:
    """State letter and parent of a process; ``("X", 0)`` when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])


def marked_processes(mark: str, keep: frozenset[int] = frozenset()) -> list[int]:
    """Live processes that carry the mark, and the descendants of such processes.

    Args:
        mark: Value of ``MARK_VARIABLE``.
        keep: Processes to leave out; the caller itself is always left out.
    """
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names only
    states = {pid: _state_and_parent(pid) for pid in pids}
    alive = {pid: parent for pid, (state, parent) in states.items() if state not in "ZX"}
    keep = keep | {os.getpid()}
    found = {pid for pid in alive if pid not in keep and _is_marked(pid, mark)}
    while True:
        more = {pid for pid, parent in alive.items() if parent in found and pid not in found | keep}
        if not more:
            return sorted(found)
        found |= more


def end_marked(mark: str, *, term_seconds: float, kill_seconds: float, keep: frozenset[int] = frozenset()) -> list[int]:
    """Ask all marked processes to end, then kill what is left.

    Args:
        mark: Value of ``MARK_VARIABLE``.
        term_seconds: Time between the request and the kill; 0 kills at once.
        kill_seconds: How long to wait for killed processes to vanish.
        keep: Processes that are not touched.

    Returns:
        Processes still alive when the time was over; empty in every case but a hung kernel call.
    """
    for signum, seconds in ((signal.SIGTERM, term_seconds), (signal.SIGKILL, kill_seconds)):
        if seconds <= 0:
            continue
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while True:
            remaining = marked_processes(mark, keep)
            if not remaining:
                return []
            for pid in remaining:
                # A process may start children while it is being ended: look again each time.
                if pid not in signalled or signum == signal.SIGKILL:
                    signalled.add(pid)
                    _signal(pid, signum)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    return marked_processes(mark, keep)


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


class Guardian:
    """The driver's handle on its guardian process."""

    def __init__(self, mark: str, scratch_dir: Path) -> None:
        """Start the guardian.

        Args:
            mark: Mark of the processes to end.
            scratch_dir: Removed after the last process ended.
        """
        self.mark = mark
        self.scratch_dir = scratch_dir
        read_end, self._write_end = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k != MARK_VARIABLE}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                __file__,
                "--pipe",
                str(read_end),
                "--mark",
                mark,
                "--scratch",
                str(scratch_dir),
            ],
            pass_fds=(read_end,),
            start_new_session=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        os.close(read_end)

    def close(self) -> None:
        """Let the guardian do its work and end; returns when it has, bounded."""
        if self._write_end < 0:
            return
        os.close(self._write_end)
        self._write_end = -1
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)


def main() -> None:
    """Wait until the pipe closes, then sweep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--mark", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(options.pipe, 1):
        pass
    end_marked(options.mark, term_seconds=0.5, kill_seconds=10.0)
    shutil.rmtree(options.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
