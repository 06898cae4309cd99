"""What surrounds every weight update, whichever way the weights take.

Owns the order: pause, flush, begin, (send), end, verify, continue; and what a failure leaves behind: no engine is open
for weights, and none goes on, because it may hold parts of two versions. The driver, which knows whether there will be
another try, lets them go with ``release``. Runs on the rank that leads the update. Tests hold: the order; a pending
request is waited for a bounded number of times; after a failure at any point no engine is open or generates.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from slime.engines import api
from slime.errors import SlimeError, WeightSyncError
from slime.http_control import HttpStatusError
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint

logger = logging.getLogger(__name__)

_FLUSH_TRIES = 60
_FLUSH_FIRST_WAIT_SECONDS = 0.05
_FLUSH_WAIT_SECONDS = 1.0
_WAY_OUT_SECONDS = (0.25, 5.0)
_NOT_FOUND = 404
_REFUSED = 400


class Check(Protocol):
    """Asks paused engines whether they hold what was sent."""

    def __call__(self, version: str, *, send_seconds: float) -> None:
        """Compare.

        Raises:
            WeightSyncError: An engine holds something else.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketTimes:
    """Seconds of the parts of one update.

    Args:
        prepare: Pause, flush and begin.
        send: What the transport did.
        finish: End, verify and continue.
    """

    prepare: float
    send: float
    finish: float

    @property
    def total(self) -> float:
        """From the pause to the continuation."""
        return self.prepare + self.send + self.finish

    @property
    def metrics(self) -> dict[str, float]:
        """Under their metric names."""
        return {
            "perf/update_weights_prepare_time": self.prepare,
            "perf/update_weights_send_time": self.send,
            "perf/update_weights_finish_time": self.finish,
        }


class UpdateBracket:
    """Pauses engines for an update and lets them go on afterwards.

    Args:
        calls: To the engines.
        pause_mode: What happens to requests that run: ``retract`` computes them on with the new weights, ``abort``
            ends them, ``in_place`` keeps their cached keys and values of the old weights.
        has_session: Whether the weights come through requests that SGLang wants between begin and end.
    """

    def __init__(self, calls: EngineCalls, *, pause_mode: api.PauseMode = "retract", has_session: bool = True) -> None:
        self._calls = calls
        self._pause_mode: api.PauseMode = pause_mode
        self._has_session = has_session
        self._open: set[str] = set()
        self.times: BracketTimes | None = None

    @contextlib.contextmanager
    def opened(
        self, version: str, check: Check | None = None, when_quiet: Callable[[], None] | None = None
    ) -> Generator[None]:
        """The engines paused, flushed and open for weights while the body runs.

        Args:
            version: Of the new weights.
            check: Called after the body, while the engines are still paused.
            when_quiet: Called when they are paused and flushed, before they are open for weights.

        Raises:
            WeightSyncError: An engine cannot be made ready, or holds something else afterwards.
            EngineError: An engine cannot be reached.
            WaitTimeoutError: An engine did not answer in time.
        """
        self._calls.deadline.restart()
        self._open.clear()
        started = time.monotonic()
        try:
            self._calls.to_all(api.PAUSE_GENERATION, {"mode": self._pause_mode})
            if self._pause_mode != "in_place":
                self._calls.each(self._flush)
            if when_quiet is not None:
                when_quiet()
            if self._has_session:
                self._calls.each(self._begin)
            opened = time.monotonic()
            yield
            sent = time.monotonic()
            self._calls.each(self._end)
            if check is not None:
                check(version, send_seconds=time.monotonic() - started)
            self._calls.to_all(api.CONTINUE_GENERATION, {})
        except BaseException:
            seconds = min(max(self._calls.deadline.grace_seconds, _WAY_OUT_SECONDS[0]), _WAY_OUT_SECONDS[1])
            release(self._calls.endpoints, has_session=self._has_session, timeout_seconds=seconds, resume=False)
            raise
        self.times = BracketTimes(prepare=opened - started, send=sent - opened, finish=time.monotonic() - sent)

    def _flush(self, endpoint: EngineEndpoint) -> None:
        """Forget what the old weights computed; a request that is still on its way is waited for.

        Asked without a time to wait: SGLang then looks past retracted requests, which a flush that waits does not.
        """
        for tried in range(_FLUSH_TRIES):
            try:
                self._calls.call(endpoint, api.FLUSH_CACHE, {})
                return
            except HttpStatusError as error:
                if error.status != _REFUSED:
                    raise
                seconds = min(_FLUSH_FIRST_WAIT_SECONDS * 2**tried, _FLUSH_WAIT_SECONDS)
                if tried == _FLUSH_TRIES - 1 or self._calls.deadline.seconds_left <= seconds:
                    raise WeightSyncError(
                        f"the cache of {endpoint.name} could not be flushed before the update: {error}"
                    ) from None
            time.sleep(seconds)

    def _begin(self, endpoint: EngineEndpoint) -> None:
        try:
            self._calls.call(endpoint, api.BEGIN_WEIGHT_UPDATE, {})
        except HttpStatusError as error:
            if error.status == _NOT_FOUND:  # SGLang before 0.5.21 does not know it, and does without
                return
            if error.status != _REFUSED:
                raise
            # Still open from an update at whose end the engine did not answer.
            self._calls.call(endpoint, api.END_WEIGHT_UPDATE, {})
            self._calls.call(endpoint, api.BEGIN_WEIGHT_UPDATE, {})
        self._open.add(endpoint.url)

    def _end(self, endpoint: EngineEndpoint) -> None:
        if endpoint.url in self._open:
            self._calls.call(endpoint, api.END_WEIGHT_UPDATE, {})


def release(
    endpoints: Sequence[EngineEndpoint], *, has_session: bool, timeout_seconds: float, resume: bool = True
) -> None:
    """Let engines go after a failed update: one left open refuses the next, one left paused hangs its clients.

    Args:
        endpoints: The engines; one that does not answer is left alone.
        has_session: Whether to close the update as well.
        timeout_seconds: For each of at most two requests.
        resume: Whether they generate again. Not before another update, if some may hold parts of the failed one.
    """
    calls = EngineCalls(endpoints, Deadline(timeout_seconds))
    paths = [api.END_WEIGHT_UPDATE] if has_session else []
    paths += [api.CONTINUE_GENERATION] if resume else []

    def let_go(endpoint: EngineEndpoint) -> None:
        for path in paths:
            try:
                calls.call(endpoint, path, {}, timeout_seconds=timeout_seconds)
            except SlimeError as error:
                level = logging.DEBUG if isinstance(error, HttpStatusError) else logging.WARNING
                logger.log(level, "after a failed weight update: %s", error)

    calls.each(let_go)
