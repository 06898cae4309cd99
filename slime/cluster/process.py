"""One server process: started with its log, watched, and never outliving its parent.

Owns start, readiness, liveness and end of a child process. Tests hold: the log's end is in the
error when a server does not come up, and the child dies with its parent even if that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.cluster.signals import ENDING
from slime.errors import EngineError, WaitTimeoutError
from slime.http_control import request
from slime.observability.logger import tail
from slime.observability.watchdog import expired

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """Runs in the child between fork and exec: only async-signal-safe calls."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # a thread of a Ray worker may hold them back


class ServerProcess:
    """A child process that serves HTTP."""

    def __init__(self, name: str, command: Sequence[str], *, log_path: Path, env: Mapping[str, str]) -> None:
        """Start the process; it is killed by the kernel when the calling thread's process dies.

        Args:
            name: For messages, for example ``"engine 0"``.
            command: Program and arguments.
            log_path: Receives its output, appended.
            env: Environment added to ours.
        """
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                list(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
                start_new_session=True,  # its own group: a terminal's Ctrl-C is the driver's to handle
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.poll()

    def log_tail(self, num_lines: int = 20) -> str:
        """The end of its log."""
        return tail(self.log_path, num_lines)

    def check(self) -> None:
        """Raise EngineError with the log's end if the process is gone."""
        code = self.exit_code()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise EngineError(f"{self.name} died ({how}); end of {self.log_path}:\n{self.log_tail()}")

    def wait_ready(self, url: str, *, timeout_seconds: float, poll_seconds: float = 0.1) -> None:
        """Wait until ``url`` answers 200.

        Raises:
            EngineError: The process died first.
            WaitTimeoutError: Not ready in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not responds(url):
            self.check()
            if time.monotonic() > deadline:
                raise expired(
                    waiter="the cluster",
                    waited_for=f"{self.name} to answer {url}",
                    timeout_seconds=timeout_seconds,
                    details=f"end of {self.log_path}:\n{self.log_tail()}",
                )
            time.sleep(poll_seconds)

    def stop(self, *, term_seconds: float = 3.0) -> None:
        """End the process and its group; safe to call twice."""
        for signum, seconds in ((signal.SIGTERM, term_seconds), (signal.SIGKILL, 5.0)):
            if self._process.poll() is not None:
                break
            _signal_group(self._process.pid, signum)
            try:
                self._process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                continue
        _signal_group(self._process.pid, signal.SIGKILL)  # workers a dead server left behind

    def kill(self) -> None:
        """End the process and its group by force, without giving it a chance to answer anything more."""
        _signal_group(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)


def _signal_group(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def responds(url: str, timeout_seconds: float = 5.0) -> bool:
    """Whether a GET is answered well."""
    try:
        request(url, timeout_seconds=timeout_seconds)
    except (EngineError, WaitTimeoutError):
        return False
    return True
