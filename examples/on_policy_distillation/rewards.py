"""Measure the task, train on the teacher alone.

The reward is the quickstart's: whether the answer is right. Post-processing keeps it as the logged reward and
trains on 0, so that whatever the student learns comes from the teacher's log-probs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime.rollout.on_policy_distillation import post_process_rewards, reward_func

from slime.types import Sample

NUMBER = re.compile(r"\d+")


def is_right(sample: Sample) -> float:
    """1.0 when the answer names the label and no other number."""
    return float(NUMBER.findall(sample.response) == [str(sample.label)])


async def task(args: Any, sample: Sample, **kwargs: Any) -> float:
    """The reward beside a teacher in the trainer, and in evaluations."""
    return is_right(sample)


async def task_and_teacher(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """The reward beside a teacher behind --rm-url: its reply, and the score under --reward-key."""
    return {**await reward_func(args, sample), "score": is_right(sample)}


def only_teacher(args: Any, samples: Sequence[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """(rewards as logged, rewards as trained on)."""
    if args.opd_type == "sglang":
        raw, _ = post_process_rewards(args, samples)
    else:
        raw = [float(sample.reward) for sample in samples]
    return raw, [0.0] * len(samples)
