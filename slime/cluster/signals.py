"""Signals that end a run: what the driver makes of them, and that nothing else of the run follows them.

A scheduler signals every process of a job, a terminal every process of its group, while only the driver
knows what to save first. Tests hold: with SIGTERM to the whole group the run still saves, and a signal
that arrives while Ray starts is not lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

ENDING = frozenset({signal.SIGTERM, signal.SIGHUP})


class Terminated(BaseException):
    """SIGTERM or SIGHUP ended the run; not an ``Exception``, so that nothing on the way swallows it."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


@dataclass(slots=True)
class Ending:
    """The ending signal that arrived, if one did."""

    signum: signal.Signals | None = None


@contextmanager
def terminable() -> Generator[Ending]:
    """Leave the block with ``Terminated`` on the first ending signal; later ones do not disturb the end.

    Inside it the signal is a ``KeyboardInterrupt``, the only exception that may come out of Ray's waits.
    For use after Ray, which takes SIGTERM for itself when it starts.
    """
    ending = Ending()
    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    previous = {s: signal.getsignal(s) for s in ENDING}

    def terminate(signum: int, frame: FrameType | None) -> None:
        for s in previous:
            signal.signal(s, signal.SIG_IGN)
        ending.signum = signal.Signals(signum)
        raise KeyboardInterrupt

    for s in previous:
        signal.signal(s, terminate)
    try:
        yield ending
    except KeyboardInterrupt:
        if ending.signum is not None:
            raise Terminated(ending.signum) from None
        raise
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


@contextmanager
def held_back() -> Generator[None]:
    """Keep ending signals and Ctrl-C waiting; processes started inside the block hold them back for good.

    A blocked signal stays blocked through fork and exec: this is how Ray's daemons, whose own handlers
    would take the whole cluster down, and the workers they start are made deaf to them. Ctrl-C waits too,
    because Python drops an exception that a signal raises while it forks (in ``logging``'s hook, for one).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_driver() -> None:
    """In an actor: let only the driver react to Ctrl-C and to ending signals.

    The handlers do nothing rather than being ``SIG_IGN``, and nothing stays blocked, because both would
    be inherited by children, which are ended with these signals.
    """
    for s in (signal.SIGINT, *ENDING):
        signal.signal(s, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *ENDING})


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    del signum, frame
