"""What a grader answers, and what stands in when it does not answer in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.errors import WaitTimeoutError

Reward = float | dict[str, Any]
"""A number, or a dict when the reward has parts."""

Metadata = Mapping[str, Any]


class RewardTimeoutError(WaitTimeoutError):
    """Grading took longer than ``--rm-timeout``; the reward is then 0."""


def zero_reward(reward_key: str | None, eval_reward_key: str | None) -> Reward:
    """Reward 0 in the form that ``--reward-key`` and ``--eval-reward-key`` select from."""
    keys = [key for key in (reward_key, eval_reward_key) if key]
    return dict.fromkeys(keys, 0.0) if keys else 0.0


@dataclass(frozen=True, slots=True)
class Grade:
    """A decided reward.

    Args:
        reward: The reward.
        unparsed: No answer could be read out of the response; counted.
        note: Why, as a constant text; told to the operator once per text.
    """

    reward: Reward
    unparsed: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A reward that hangs on work that may be slow or never end; a worker process does it.

    Args:
        function: ``module:attribute`` of a function that answers with a bool.
        arguments: Its picklable arguments.
        if_true: Grade when it answers true.
        if_false: Grade when it answers false, fails or takes too long.
    """

    function: str
    arguments: tuple[Any, ...]
    if_true: Grade
    if_false: Grade
