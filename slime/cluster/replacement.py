"""One dead engine or router made anew in its place, in the background.

Owns the steps of a replacement and its bound. Tests hold: the new process is on the same slots, and what kept it from
starting is told with the end of its log; whatever ends a replacement early is its error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from slime.cluster.engine_server import EngineServer
from slime.cluster.hosted_server import failures
from slime.cluster.process import responds
from slime.cluster.router_server import RouterServer
from slime.errors import EngineError, SlimeError, WaitTimeoutError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


class Replacement:
    """Ends a server, starts it again and waits until it answers.

    Args:
        server: What is replaced.
        prepare: Done first, for example taking it out of its router's list.
        finish: Done when it answers.
        timeout_seconds: How long the start may take.
    """

    def __init__(
        self,
        server: EngineServer | RouterServer,
        *,
        prepare: Callable[[], None],
        finish: Callable[[], None],
        timeout_seconds: float,
    ) -> None:
        self.server = server
        self.error: SlimeError | None = None
        self._prepare = prepare
        self._finish = finish
        self._timeout_seconds = timeout_seconds
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"slime-replace-{server.name}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def cancel(self, timeout_seconds: float) -> None:
        """Give it up and wait until it has ended; what it started is ended with the run's processes."""
        self._cancelled.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        started = time.monotonic()
        server = self.server
        try:
            self._prepare()
            server.kill()
            if self._cancelled.is_set():
                return
            server.launch()
            if self._is_ready(started):
                self._finish()
        except SlimeError as error:
            self.error = error
            return
        except Exception as error:  # thread boundary: without an error the server would count as back
            logger.exception("%s was not replaced", server.name)
            self.error = EngineError(f"the replacement of {server.name} failed: {type(error).__name__}: {error}")
            return
        logger.info("%s is back after %.1f s at %s", server.name, time.monotonic() - started, server.url)

    def _is_ready(self, started: float) -> bool:
        """Wait for the server; False if that was given up."""
        server = self.server
        while not responds(server.ready_url):
            for error in failures(server.processes).values():
                raise error
            if time.monotonic() - started > self._timeout_seconds:
                log = server.processes[0].log_path
                raise WaitTimeoutError(
                    f"{server.name} was started again and did not answer {server.ready_url} within "
                    f"--engine-start-timeout-seconds {self._timeout_seconds:g}; its log is {log}"
                )
            if self._cancelled.wait(_POLL_SECONDS):
                return False
        return True
