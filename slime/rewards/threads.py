"""Plain functions in threads that are given up when they take too long.

A thread cannot be killed, so a call past its time is left to itself and another thread takes the
place of its own. Tests hold: the time of a call does not count its wait for a thread; hanging calls
neither keep later ones waiting nor pile up without end.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from slime.errors import PluginError
from slime.rewards.grade import RewardTimeoutError


class Call:
    """One call, from its place in the queue to its result."""

    def __init__(self, function: Callable[[Call], Any]) -> None:
        self.started: Future[None] = Future()
        self.result: Future[Any] = Future()
        self.is_finished = False
        self.is_abandoned = False
        self._function = function

    def run(self) -> None:
        """Call the function in the thread that this runs in."""
        self.started.set_result(None)
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            value = self._function(self)
        except BaseException as error:  # noqa: BLE001 - plug-in boundary: handed to the one who waits
            # An event loop ends on SystemExit and cannot pass StopIteration on.
            is_passable = isinstance(error, Exception) and not isinstance(error, StopIteration)
            self.result.set_exception(error if is_passable else RuntimeError(f"raised {error!r}"))
        else:
            self.result.set_result(value)


class CallThreads:
    """Daemon threads that serve calls first come, first served.

    Args:
        what: The function or class that is called, as users know it.
        num_threads: Calls at a time.
        max_abandoned: Calls that may still run after they were given up.
    """

    def __init__(self, what: str, *, num_threads: int, max_abandoned: int) -> None:
        self._what = what
        self._num_threads = num_threads
        self._max_abandoned = max_abandoned
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._num_serving = 0
        self._num_idle = 0
        self._num_abandoned = 0
        self._closed = False

    @property
    def num_abandoned(self) -> int:
        """Calls that were given up and still run."""
        return self._num_abandoned

    async def run(self, function: Callable[[], Any], *, timeout_seconds: float) -> Any:
        """Call a function in a thread.

        The wait for a thread is bounded too: every call before this one ends or is given up in time.

        Args:
            function: Called without arguments.
            timeout_seconds: Most seconds from the start of the call.

        Raises:
            RewardTimeoutError: It took longer and was given up.
            PluginError: See ``submit``.
        """
        call = self.submit(lambda _: function())
        try:
            await asyncio.wait([asyncio.wrap_future(call.started)])
            result = asyncio.wrap_future(call.result)
            done, _ = await asyncio.wait([result], timeout=timeout_seconds)
        except asyncio.CancelledError:
            self.abandon(call)
            raise
        if done:
            return result.result()
        self.abandon(call)
        result.cancel()  # nobody will ask for its outcome
        raise RewardTimeoutError(f"the rollout waited {timeout_seconds:g} s for {self._what}")

    def submit(self, function: Callable[[Call], Any]) -> Call:
        """Queue a call; the function gets the call itself.

        Raises:
            PluginError: Too many calls are still running after they were given up.
        """
        call = Call(function)
        with self._changed:
            if self._closed:
                raise PluginError(f"{self._what} was called after the rollout's rewards were closed")
            if self._num_abandoned > self._max_abandoned:
                raise PluginError(
                    f"{self._num_abandoned} calls of {self._what} have passed --rm-timeout and still run in their "
                    f"threads, at most {self._max_abandoned} may; give what it waits for a time-out of its own, "
                    "make it `async def`, or raise --rm-timeout"
                )
            self._waiting.append(call)
            self._grow()
            self._changed.notify()
        return call

    def abandon(self, call: Call) -> None:
        """Give a call up: drop it if it has not begun, else let another thread take the place of its own."""
        with self._changed:
            if call in self._waiting:
                self._waiting.remove(call)
            elif not call.is_finished and not call.is_abandoned:
                call.is_abandoned = True
                self._num_abandoned += 1
                self._num_serving -= 1
                self._grow()

    def close(self) -> None:
        """End the threads, each as soon as its call returns; drop what waits."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _grow(self) -> None:
        """Start a thread if one is wanted; the lock is held."""
        if len(self._waiting) > self._num_idle and self._num_serving < self._num_threads:
            self._num_serving += 1
            threading.Thread(target=self._serve, name="custom-reward", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            with self._changed:
                call.is_finished = True
                if call.is_abandoned:  # its place is taken
                    self._num_abandoned -= 1
                    return

    def _next(self) -> Call | None:
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._num_idle -= 1
            return self._waiting.popleft() if self._waiting else None
