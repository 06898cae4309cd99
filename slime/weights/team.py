"""Training ranks that act together during a weight update, and what they say when one does not come.

Owns a gloo group of their own besides the trainer's: with NCCL underneath, Python objects and bounded meetings need
one. Tests hold: a failure of one rank reaches all; a rank that does not come is named in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch.distributed

from slime.errors import WaitTimeoutError
from slime.weights.control import Deadline

T = TypeVar("T")

dist = cast(Any, torch.distributed)


class RankTeam(Generic[T]):
    """Some of the training ranks. Making one is collective over all of them, also for those that are not in it.

    Args:
        ranks: Members, by their number in the trainer; the first one leads.
        rank: This process.
        deadline: Of the update; a meeting is bounded by what is left of it.
    """

    def __init__(self, ranks: Sequence[int], *, rank: int, deadline: Deadline) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self._deadline = deadline
        self._group: Any = None
        if len(self.ranks) > 1:
            limit = timedelta(seconds=deadline.timeout_seconds)
            self._group = dist.new_group(list(self.ranks), backend="gloo", timeout=limit)

    @property
    def is_member(self) -> bool:
        """Whether this rank belongs to it."""
        return self.rank in self.ranks

    @property
    def leads(self) -> bool:
        """Whether this rank is the first."""
        return self.rank == self.ranks[0]

    def exchange(self, value: T, doing: str) -> list[T]:
        """Everybody's value, in the order of the ranks; a meeting of all members.

        Raises:
            WaitTimeoutError: Not all members came in time.
        """
        if self._group is None:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        # The leader's own time ends first, so that what it waited for is what is reported.
        seconds = self._deadline.seconds_left + (0.0 if self.leads else self._deadline.grace_seconds)
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=seconds), wait_all_ranks=True)
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise WaitTimeoutError(
                f"trainer rank {self.rank} waited {seconds:.0f} s for the trainer ranks "
                f"{', '.join(map(str, self.ranks))} to {doing}: {_first_line(error)}"
            ) from error
        return values

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None and self.is_member and dist.is_initialized():
            dist.destroy_process_group(group)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
