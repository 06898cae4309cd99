"""Requests that are issued again: which engine gets one next, and which engines answer badly.

Owns what the rollout learns about engines from their answers, with ``--use-fault-tolerance``. The
driver learns of dead engines by itself; only the rollout sees that one answers nonsense. Tests hold:
a request is not sent to an engine again while there is another; an engine that answered badly several
times in a row gets nothing more and is reported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

SUSPECT_AFTER = 3
QUIET_SECONDS = 10.0


class Reissues:
    """What is known about engines, for all requests of one client.

    One loop changes it; other threads may read ``suspects`` and ``count``.

    Args:
        suspect_after: Requests that get a bad answer, with no good one in between, that make an engine a suspect.
    """

    def __init__(self, suspect_after: int = SUSPECT_AFTER) -> None:
        self._suspect_after = suspect_after
        self._bad_in_a_row: dict[str, set[int]] = {}
        self._turn = self._num_requests = 0
        self._quiet_until = 0.0
        self._counted = 0
        self.count = 0
        self.suspects: dict[str, str] = {}

    def new_request(self) -> int:
        """A number that tells a request from the others."""
        self._num_requests += 1
        return self._num_requests

    def good(self, url: str) -> None:
        """Take in that the engine at ``url`` answered as it should."""
        self._bad_in_a_row.pop(url, None)
        if url in self.suspects:
            self.suspects = {known: fault for known, fault in self.suspects.items() if known != url}

    def bad(self, url: str, request: int, fault: str) -> None:
        """Take in that ``request``, sent straight to the engine at ``url``, got no answer of use.

        One request counts once: it may be what is wrong itself.
        """
        requests = self._bad_in_a_row.setdefault(url, set())
        requests.add(request)
        if len(requests) >= self._suspect_after:
            self.suspects = {**self.suspects, url: fault}

    def trusted(self, engines: Sequence[str]) -> list[str]:
        """Those that are no suspects; all of them where nobody else is left."""
        return [url for url in engines if url not in self.suspects] or list(engines)

    def choose(self, engines: Sequence[str], tried: Sequence[str]) -> str:
        """The engine for the next attempt of a request: of the trusted ones that it met least often, in turn.

        Args:
            engines: Engines that take requests; at least one.
            tried: Where the request was sent so far.
        """
        trusted = self.trusted(engines)
        fewest = min(tried.count(url) for url in trusted)
        candidates = [url for url in trusted if tried.count(url) == fewest]
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def take_count(self) -> int:
        """Requests issued again since the last call."""
        new, self._counted = self.count - self._counted, self.count
        return new

    def should_warn(self) -> bool:
        """Whether a fault is worth a line for the operator: one dead engine fails hundreds of requests at once."""
        now = time.monotonic()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + QUIET_SECONDS
        return True
