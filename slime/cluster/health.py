"""Regular questions to engines and routers: can you still do your work?

Owns when each is asked, and what counts as no. One slow answer is not death: a question without an answer is asked
again at once, and only several in a row are a failure. What follows from a failure is the owner's business.

The first question comes an interval after ``resume``, not with it: an engine that just woke is about to get a rollout,
and SGLang answers the question by generating a token greedily. When that request is the first of a batch, the batch is
sampled by the slower way of mixed requests until it is empty: measured on one H200, 22,000 instead of 34,000 tokens per
second. An engine that is at work when it is asked answers from its progress alone.

Tests hold: nothing is asked while paused, nor for the first wait and an interval after that; ``pause`` returns when no
question is under way any more, whose outcome is dropped; a server that does not answer is told within the interval and
the time-outs; no answer and no fault of ours ends the checks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from slime import http_control
from slime.errors import EngineError, WaitTimeoutError

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 1.0


def health_problem(
    url: str, timeout_seconds: float, attempts: int, is_wanted: Callable[[], bool] = lambda: True
) -> str | None:
    """What is wrong with the server whose health is asked at ``url``; None if it is well.

    Args:
        url: Answers 200 when all is well.
        timeout_seconds: For one answer.
        attempts: Questions that must fail.
        is_wanted: Asked before each question; False ends them.
    """
    problem: str | None = None
    for _ in range(attempts):
        if not is_wanted():
            return problem
        try:
            http_control.request(url, timeout_seconds=timeout_seconds, waiter="the health check")
        except (EngineError, WaitTimeoutError) as error:
            problem = str(error)
        except Exception as error:  # thread boundary: the check of one server must not end those of all
            logger.exception("the health check of %s failed", url)
            problem = f"its health check failed: {type(error).__name__}: {error}"
        else:
            return None
    return problem


class HealthMonitor:
    """Asks servers from a thread of its own; paused when it is made.

    Args:
        targets: Names of what is asked now, with the URLs that answer 200 when all is well.
        on_failure: Told name, URL and reason; called from the monitor's thread.
        interval_seconds: From one round of checks to the next.
        timeout_seconds: What a server has to answer one question.
        first_wait_seconds: After ``resume``, before the first interval.
        attempts: Questions in a row that must fail.
    """

    def __init__(
        self,
        targets: Callable[[], Mapping[str, str]],
        on_failure: Callable[[str, str, str], None],
        *,
        interval_seconds: float,
        timeout_seconds: float,
        first_wait_seconds: float,
        attempts: int = 2,
    ) -> None:
        self._targets = targets
        self._on_failure = on_failure
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._first_wait_seconds = first_wait_seconds
        self._attempts = attempts
        self._changed = threading.Condition()
        self._due_at: float | None = None
        self._period = 0  # between two pauses: outcomes of an earlier one say nothing any more
        self._num_asking = 0  # rounds whose questions are under way
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="slime-health", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def resume(self) -> None:
        """Ask from now on, after the first wait and an interval; does nothing while it asks already."""
        with self._changed:
            if self._due_at is None:
                self._period += 1
                self._due_at = time.monotonic() + self._first_wait_seconds + self._interval_seconds
                self._changed.notify()

    def pause(self) -> None:
        """Ask nothing, drop the outcomes of questions that are under way, and wait for their end.

        An engine that still answers one is not idle: it could not flush its cache, nor give its memory away.
        """
        with self._changed:
            self._due_at = None
            self._period += 1
            if not self._changed.wait_for(lambda: not self._num_asking, self._timeout_seconds + _CLOSE_SECONDS):
                logger.warning("a health check is still under way")

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._due_at = None
            self._period += 1
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._due_at is None or self._due_at > time.monotonic()):
                    left = None if self._due_at is None else self._due_at - time.monotonic()
                    self._changed.wait(left)
                if self._closed:
                    return
                period = self._period
                self._due_at = time.monotonic() + self._interval_seconds
            try:
                self._round(period, dict(self._targets()))
            except Exception:  # thread boundary: a check that ended unseen would look like good health
                logger.exception("a round of health checks failed")

    def ask_now(self, targets: Mapping[str, str]) -> None:
        """One round of questions at once, paused or not, in the caller's thread."""
        self._round(self._period, targets)

    def _round(self, period: int, targets: Mapping[str, str]) -> None:
        urls = list(targets.values())
        with self._changed:
            self._num_asking += 1
        try:
            problems = http_control.in_parallel(
                lambda url: health_problem(url, self._timeout_seconds, self._attempts, lambda: period == self._period),
                urls,
            )
        finally:
            with self._changed:
                self._num_asking -= 1
                self._changed.notify_all()
        for (name, url), problem in zip(targets.items(), problems, strict=True):
            with self._changed:
                if period != self._period:
                    return
            if problem is not None:
                self._on_failure(name, url, problem)
