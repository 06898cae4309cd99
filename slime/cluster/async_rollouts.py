"""Rollouts that run ahead of training, at rollout boundaries.

Owns the bounded queue of ``train_async.py``: at most N rollouts are in progress or finished and
waiting. Tests hold: N = 1 begins rollout k + 1 exactly when k is taken; nothing generates inside
``paused``, and what is in progress goes on where syncs may happen inside; a failed rollout raises where it is taken;
staleness never passes the bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Generic, TypeVar

from slime.errors import WaitTimeoutError
from slime.observability.watchdog import expired

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 0.5
_JOIN_SECONDS = 5.0


class AsyncRollouts(Generic[T]):
    """A producer thread around ``generate`` and the queue of what it made.

    Args:
        generate: Makes the rollout of one step and returns when it is complete.
        first_step: Step to begin with.
        num_rollout: Exclusive end.
        buffer_size: N, how many rollouts may be in progress or waiting.
        timeout_seconds: Bound of each wait for a rollout.
        syncs_inside: Whether weights may change in the middle of a rollout.
    """

    def __init__(
        self,
        generate: Callable[[int], T],
        *,
        first_step: int,
        num_rollout: int,
        buffer_size: int,
        timeout_seconds: float,
        syncs_inside: bool = False,
    ) -> None:
        self._syncs_inside = syncs_inside
        self._generate = generate
        self._next_step = first_step
        self._num_rollout = num_rollout
        self._buffer_size = buffer_size
        self._timeout_seconds = timeout_seconds
        self._finished: OrderedDict[int, T] = OrderedDict()
        self._in_progress: int | None = None
        self._pauses = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._produce, name="slime-rollouts-ahead", daemon=True)

    def __enter__(self) -> AsyncRollouts[T]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop beginning rollouts; one in progress is left to the end of the run's processes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if kind is None:
            self._thread.join(timeout=_JOIN_SECONDS)

    def take(self, step: int) -> T:
        """The rollout of ``step``; its place in the queue is free from now on.

        Raises:
            WaitTimeoutError: It was not complete in time.
            SlimeError: What its generation raised.
        """
        self._wait_for(lambda: step in self._finished, f"rollout {step}")
        with self._changed:
            rollout = self._finished.pop(step)
            self._changed.notify_all()
        return rollout

    @contextmanager
    def ready_for_sync(self) -> Iterator[None]:
        """Come to where weights may change: the end of the rollout in progress, unless that may go on meanwhile."""
        if self._syncs_inside:
            yield
            return
        with self.paused():
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Finish the rollout in progress, and begin none inside the block."""
        with self._changed:
            self._pauses += 1
        try:
            self._wait_for(lambda: self._in_progress is None, f"rollout {self._in_progress} in progress to be complete")
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool], waited_for: str) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        with self._changed:
            while not condition():
                if self._error is not None:
                    raise self._error
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._expired(waited_for)
                self._changed.wait(min(_POLL_SECONDS, remaining))

    def _expired(self, waited_for: str) -> WaitTimeoutError:
        state = f"in progress: {self._in_progress}, waiting: {list(self._finished)}, next: {self._next_step}"
        return expired(waiter="training", waited_for=waited_for, timeout_seconds=self._timeout_seconds, details=state)

    def _may_begin(self) -> bool:
        return not self._pauses and len(self._finished) < self._buffer_size and self._error is None

    def _produce(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._may_begin():
                    self._changed.wait(_POLL_SECONDS)
                if self._closed or self._next_step >= self._num_rollout:
                    return
                step = self._in_progress = self._next_step
                self._next_step += 1
            try:
                rollout = self._generate(step)
            except Exception as error:  # noqa: BLE001 - thread boundary: raised again where the rollout is taken
                with self._changed:
                    self._error, self._in_progress = error, None
                    self._changed.notify_all()
                return
            with self._changed:
                self._finished[step] = rollout
                self._in_progress = None
                self._changed.notify_all()
