"""How many bytes a piece of code holds at most: every allocation of the CPU allocator, in its order."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

CHILD_SECONDS = 150.0


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that tensors made by ``work`` take at a time, those inside of operators included.

    The profiler leaves a thread behind: call it in a process of its own.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
        del result
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def in_child(work: Callable[[], T]) -> T:
    """What ``work`` returns in a fork of this process, so that nothing it starts stays here."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(work, theirs))
    child.start()
    theirs.close()
    try:
        assert ours.poll(CHILD_SECONDS), f"no answer within {CHILD_SECONDS:g} s"
        result, failure = ours.recv()
        assert failure is None, failure
        return result
    finally:
        child.kill()
        child.join(10)


def _report(work: Callable[[], T], answer: Connection) -> None:
    gc.freeze()  # what the parent left to collect may have threads that are not here
    try:
        answer.send((work(), None))
    except BaseException:  # noqa: BLE001 - the parent fails with it
        answer.send((None, traceback.format_exc()))
