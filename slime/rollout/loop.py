"""The event loop thread of a rollout, and a concurrency limit that works across loops.

A plug-in may run its own loop in its own thread and still share the limit with the pipeline, so
the limit cannot be an ``asyncio.Semaphore``, which belongs to one loop. Tests hold that a
cancelled waiter never keeps a slot, that the order is first come first served, and that closing
a loop neither hangs nor leaves tasks behind.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import OrderedDict
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from slime.errors import WaitTimeoutError

T = TypeVar("T")

CLOSE_SECONDS = 10.0


class LoopThread:
    """An event loop in a daemon thread; callers in other threads block for results.

    Args:
        name: Name of the thread, as seen in stack dumps.
    """

    def __init__(self, name: str = "slime-rollout-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def run(self, coro: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run ``coro`` on the loop and block for its result; the caller's context variables hold in it.

        Args:
            coro: The coroutine. It is cancelled when the wait expires or is interrupted.
            timeout_seconds: Bound of the wait; None when everything in ``coro`` is bounded itself.

        Raises:
            WaitTimeoutError: The wait expired.
            RuntimeError: Called from the loop's own thread, where blocking would wait for ever.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("run() called on the rollout loop itself; await the coroutine instead")
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        try:
            return future.result(timeout_seconds)
        except concurrent.futures.TimeoutError:
            if future.done():  # the coroutine's own TimeoutError
                raise
            name = getattr(coro, "__qualname__", repr(coro))
            raise WaitTimeoutError(f"the rollout process waited {timeout_seconds} s for {name}") from None
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread, within ``CLOSE_SECONDS``."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result(CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_SECONDS)


async def _cancel_all() -> None:
    tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_SECONDS / 2)


class ConcurrencyLimit:
    """A counting semaphore for several event loops whose size may change.

    Args:
        limit: Slots. Waiters are served first come, first served.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a concurrency limit is at least 1, found {limit}")
        self._limit = limit
        self._in_use = 0
        self._lock = threading.Lock()
        self._waiters: OrderedDict[asyncio.Future[None], asyncio.AbstractEventLoop] = OrderedDict()

    @property
    def limit(self) -> int:
        """Number of slots."""
        return self._limit

    @property
    def in_use(self) -> int:
        """Slots taken now; above ``limit`` for a while after it was lowered."""
        return self._in_use

    def locked(self) -> bool:
        """Whether ``acquire`` would wait."""
        return self._in_use >= self._limit or bool(self._waiters)

    def resize(self, limit: int) -> None:
        """Change the number of slots; a smaller one takes effect as slots are released."""
        with self._lock:
            self._limit = max(1, limit)
            self._grant()

    async def acquire(self) -> bool:
        """Wait for a slot. A cancelled wait leaves nothing behind."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._in_use < self._limit and not self._waiters:
                self._in_use += 1
                return True
            future: asyncio.Future[None] = loop.create_future()
            self._waiters[future] = loop
        try:
            await future
        except BaseException:
            with self._lock:
                granted = self._waiters.pop(future, None) is None
            if granted:  # the slot was ours already when the wait was cancelled
                self.release()
            raise
        return True

    def release(self) -> None:
        """Give one slot back, from any thread.

        Raises:
            ValueError: More slots were released than acquired.
        """
        with self._lock:
            if self._in_use == 0:
                raise ValueError("a slot was released that nobody holds")
            self._in_use -= 1
            self._grant()

    def _grant(self) -> None:
        """Hand free slots to waiters; the lock is held."""
        while self._waiters and self._in_use < self._limit:
            future, loop = self._waiters.popitem(last=False)
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # that loop was closed with the waiter in it
                continue
            self._in_use += 1

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
