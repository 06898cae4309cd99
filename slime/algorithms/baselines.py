"""Reward shaping: one prompt's rollouts compared with each other, and the penalty for length.

Runs where whole groups are visible, before any sharding; plain Python numbers in and out. Tests
hold: ragged groups, fanned-out rollouts and any order of samples give the textbook values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-6


def shape_group_rewards(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    normalize_std: bool,
    leave_one_out: bool = False,
) -> list[float]:
    """Subtract each group's mean reward and, if asked, divide by its standard deviation.

    With ``leave_one_out`` a rollout is compared with the mean of the *others* of its group (RLOO,
    https://arxiv.org/abs/2402.14740).

    Samples with one ``rollout_id`` are segments of one trajectory: they share its reward (the mean
    over its samples, should they differ) and count once in the group's statistics. Groups may
    have any size. Paper: https://arxiv.org/abs/2402.03300; without the division it is the
    baseline of Dr. GRPO, https://arxiv.org/abs/2503.20783.

    Args:
        rewards: N rewards.
        group_ids: N prompt ids; the order of samples is free.
        rollout_ids: N trajectory ids, unique across groups.
        normalize_std: Divide by the unbiased standard deviation + 1e-6. A group of one rollout
            has none and gives 0.
        leave_one_out: Leave a rollout's own reward out of its baseline. A group of one rollout has
            no others and gives 0.

    Returns:
        N shaped rewards.

    Raises:
        ValueError: The columns differ in length, or a trajectory spans two groups.
    """
    if not len(rewards) == len(group_ids) == len(rollout_ids):
        raise ValueError(
            f"{len(rewards)} rewards, {len(group_ids)} group ids and {len(rollout_ids)} rollout ids; "
            "the numbers must be equal"
        )
    group_of: dict[int, int] = {}
    members: dict[int, list[float]] = {}
    for reward, group, rollout in zip(rewards, group_ids, rollout_ids, strict=True):
        if group_of.setdefault(rollout, group) != group:
            raise ValueError(f"rollout {rollout} has samples in groups {group_of[rollout]} and {group}")
        members.setdefault(rollout, []).append(float(reward))
    rollout_rewards = {rollout: float(np.mean(values)) for rollout, values in members.items()}

    groups: dict[int, list[int]] = {}
    for rollout, group in group_of.items():
        groups.setdefault(group, []).append(rollout)
    shaped: dict[int, float] = {}
    for rollouts in groups.values():
        values = np.array([rollout_rewards[r] for r in rollouts], dtype=np.float64)
        # Equal rewards must give exactly 0: rounding of the mean over 1e-6 would not.
        centred = np.zeros_like(values) if np.ptp(values) == 0 else values - values.mean()
        if leave_one_out and len(values) > 1:
            # r_i - mean of the others = n / (n - 1) * (r_i - mean of all)
            centred = centred * (len(values) / (len(values) - 1))
        if normalize_std and len(values) > 1:
            centred = centred / (values.std(ddof=1) + STD_EPSILON)
        shaped.update(zip(rollouts, centred.tolist(), strict=True))
    return [shaped[rollout] for rollout in rollout_ids]


def overlong_penalty(response_length: int, max_response_length: int, buffer_length: int, factor: float) -> float:
    """DAPO's soft over-long penalty: 0 up to the buffer, then linearly down to ``-factor``.

    Paper: https://arxiv.org/abs/2503.14476, equation 13.

    Args:
        response_length: Tokens of the response.
        max_response_length: Where the penalty reaches ``factor``; longer responses get no more.
        buffer_length: Tokens below the maximum over which it grows, at least 1.
        factor: Its size at the end, at least 0.
    """
    excess = response_length - (max_response_length - buffer_length)
    return -factor * min(max(excess / buffer_length, 0.0), 1.0)
