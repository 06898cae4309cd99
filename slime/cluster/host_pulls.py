"""Pulls on the hosts of one engine, asked for by the trainer's first rank.

They run in the actors that host the engine, in a thread of their own: a large checkpoint takes longer than the checks
of liveness wait for. What a pull does is ``weights.host_pull``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.cluster import waits
from slime.errors import EngineError
from slime.weights.pull_request import PullReport, PullRequest

FILES_THREAD = "files"
"""Concurrency group of the actors."""

_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ActorPull:
    """See ``HostPull``.

    Args:
        name: The engine, for messages.
        actors: Handles of the actors that host it, one per node, with a ``pull`` and a ``FILES_THREAD``.
    """

    name: str
    actors: tuple[Any, ...]

    def __call__(self, request: PullRequest, /) -> list[PullReport]:
        """Pull on all hosts at the same time."""
        refs = [actor.pull.options(concurrency_group=FILES_THREAD).remote(request) for actor in self.actors]
        return waits.get_all(
            refs,
            waited_for=[f"host {i} of {self.name} to pull weight version {request.version}" for i in range(len(refs))],
            timeout_seconds=request.timeout_seconds + _ANSWER_SECONDS,
            on_death=lambda i: EngineError(f"host {i} of {self.name} died while it pulled version {request.version}"),
        )
