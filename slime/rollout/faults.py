"""What can be wrong with one attempt of a request, or with its answer."""

from __future__ import annotations

from functools import partial
from typing import Any

from slime.errors import EngineError


class EngineRequestError(EngineError):
    """The engine refused a request with a 4xx status.

    Args:
        message: Method, URL, status and the body.
        status: The HTTP status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(EngineRequestError, status=self.status), self.args


class BadReplyError(EngineError):
    """An engine answered something that is no answer; another engine may do better."""


class TransientFaultError(Exception):
    """One attempt failed in a way that another attempt may not; never leaves the client.

    Args:
        message: What happened.
        answered: Whether there was an answer, however bad.
        by_engine: Whether an engine made that answer, and not the router on behalf of one that it cannot reach.
        busy: Whether the answer was that there is too much to do just now.
    """

    def __init__(self, message: str, *, answered: bool = False, by_engine: bool = False, busy: bool = False) -> None:
        super().__init__(message)
        self.answered = answered
        self.by_engine = by_engine
        self.busy = busy
