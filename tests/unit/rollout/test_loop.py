"""The concurrency limit and the loop thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import pytest

from slime.errors import WaitTimeoutError
from slime.rollout.loop import ConcurrencyLimit, LoopThread


async def test_limit_is_never_exceeded_and_order_is_kept():
    limit, running, most, order = ConcurrencyLimit(3), 0, 0, []

    async def job(i: int) -> None:
        nonlocal running, most
        async with limit:
            order.append(i)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*(job(i) for i in range(20)))
    assert most == 3
    assert order == list(range(20))
    assert limit.in_use == 0


async def test_cancelled_waiters_leave_no_slot_taken():
    limit = ConcurrencyLimit(1)
    await limit.acquire()
    waiters = [asyncio.create_task(limit.acquire()) for _ in range(4)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    limit.release()  # granted to the second waiter ...
    waiters[1].cancel()  # ... who is cancelled before it runs again
    await asyncio.wait_for(waiters[2], 1)
    assert limit.in_use == 1
    limit.release()
    await asyncio.wait_for(waiters[3], 1)
    limit.release()
    assert limit.in_use == 0


async def test_a_body_that_raises_gives_its_slot_back():
    limit = ConcurrencyLimit(1)
    with pytest.raises(KeyError):
        async with limit:
            raise KeyError
    assert limit.in_use == 0
    assert not limit.locked()


async def test_resize():
    limit = ConcurrencyLimit(1)
    await limit.acquire()
    waiter = asyncio.create_task(limit.acquire())
    await asyncio.sleep(0)
    assert limit.locked()
    limit.resize(2)
    await asyncio.wait_for(waiter, 1)
    limit.resize(1)
    limit.release()
    assert limit.locked()
    limit.release()
    assert not limit.locked()
    with pytest.raises(ValueError, match="nobody holds"):
        limit.release()


async def test_a_limit_is_shared_between_loops():
    limit = ConcurrencyLimit(1)
    await limit.acquire()
    other = LoopThread()
    entered = threading.Event()

    async def enter() -> None:
        async with limit:
            entered.set()

    future = asyncio.run_coroutine_threadsafe(enter(), other.loop)
    assert not await asyncio.to_thread(entered.wait, 0.05)
    limit.release()
    await asyncio.wrap_future(future)
    assert entered.is_set()
    assert limit.in_use == 0
    other.close()


def test_run_returns_raises_and_is_bounded():
    loop = LoopThread()

    async def give(value: int) -> int:
        return value

    async def fail() -> None:
        raise TimeoutError("its own")

    assert loop.run(give(3)) == 3
    with pytest.raises(TimeoutError, match="its own"):
        loop.run(fail())
    started = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="sleep"):
        loop.run(asyncio.sleep(30), timeout_seconds=0.05)
    assert time.monotonic() - started < 1
    loop.close()


def test_run_carries_context_variables_and_refuses_its_own_thread():
    loop = LoopThread()
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("here")

    async def read() -> str:
        with pytest.raises(RuntimeError, match="await the coroutine"):
            loop.run(asyncio.sleep(0))
        return variable.get()

    assert loop.run(read()) == "here"
    loop.close()


def test_close_cancels_what_runs():
    loop = LoopThread()
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    asyncio.run_coroutine_threadsafe(wait(), loop.loop)
    loop.close()
    assert cancelled.is_set()
    assert loop.loop.is_closed()
    loop.close()
