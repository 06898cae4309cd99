"""The cache of an engine emptied, before it gives its memory away.

An engine refuses that while a request is on its way, such as one whose client has gone: it is given a moment to end.
Tests hold: a refusal is tried again for a bounded time, and nothing else is.
"""

from __future__ import annotations

import time

from slime import http_control
from slime.engines import api
from slime.http_control import HttpStatusError

_PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_REFUSED = 400


def flush_cache(url: str, *, timeout_seconds: float) -> None:
    """Empty the cache of the engine at ``url``.

    Raises:
        HttpStatusError: It refuses for longer than a request may take to end, or answers with another error.
        EngineError: It cannot be reached.
        WaitTimeoutError: It did not answer in time.
    """
    give_up_at = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            http_control.request(url + api.FLUSH_CACHE, {}, timeout_seconds=timeout_seconds)
            return
        except HttpStatusError as error:
            if error.status != _REFUSED or time.monotonic() >= give_up_at:
                raise
        time.sleep(_PAUSE_SECONDS)
