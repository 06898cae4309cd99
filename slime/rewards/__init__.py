"""Grading of responses: built-in rules, remote and custom reward functions.

``REWARDS`` maps ``--rm-type`` to what it is. The pipeline owns a ``RewardService``; ``async_rm`` and
``batched_async_rm`` are what functions of the user call. Importing this loads no grader.
"""

from slime.rewards.registry import REWARDS, RM_TYPES
from slime.rewards.service import RewardService, async_rm, batched_async_rm, remote_rm

__all__ = ["REWARDS", "RM_TYPES", "RewardService", "async_rm", "batched_async_rm", "remote_rm"]
