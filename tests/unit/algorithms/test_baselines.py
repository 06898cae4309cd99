"""Group baselines: ragged groups, fanned-out rollouts, any order."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms import overlong_penalty, shape_group_rewards


def test_mean_and_unbiased_std_per_group() -> None:
    rewards = [1.0, 0.0, 0.0, 2.0, 5.0]
    got = shape_group_rewards(rewards, [7, 7, 7, 3, 3], range(5), normalize_std=True)
    for indices in ([0, 1, 2], [3, 4]):
        values = [rewards[i] for i in indices]
        mean, std = statistics.mean(values), statistics.stdev(values)
        assert [got[i] for i in indices] == pytest.approx([(v - mean) / (std + 1e-6) for v in values])


def test_without_std_it_is_the_centred_reward() -> None:
    assert shape_group_rewards([1, 0, 0], [0, 0, 0], range(3), normalize_std=False) == pytest.approx(
        [2 / 3, -1 / 3, -1 / 3]
    )


def test_samples_of_one_rollout_share_its_reward_and_count_once() -> None:
    fanned = shape_group_rewards([1, 1, 1, 0], [0, 0, 0, 0], [5, 5, 5, 6], normalize_std=True)
    plain = shape_group_rewards([1, 0], [0, 0], [5, 6], normalize_std=True)
    assert fanned == pytest.approx([plain[0]] * 3 + [plain[1]])


def test_differing_rewards_inside_a_rollout_are_averaged() -> None:
    assert shape_group_rewards([0, 1, 1.5], [0, 0, 0], [5, 5, 6], normalize_std=False) == pytest.approx(
        [-0.5, -0.5, 0.5]
    )


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards, groups = [1.0, 0.0, 0.5, 2.0, 3.0, 9.0], [0, 0, 0, 1, 1, 2]
    got = shape_group_rewards(rewards, groups, range(6), normalize_std=False, leave_one_out=True)
    want = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        want.append(reward - statistics.mean(others) if others else 0.0)
    assert got == pytest.approx(want)


def test_leave_one_out_leaves_out_the_whole_rollout() -> None:
    fanned = shape_group_rewards([1, 1, 0, 0.5], [0] * 4, [5, 5, 6, 7], normalize_std=False, leave_one_out=True)
    assert fanned == pytest.approx([0.75, 0.75, -0.75, 0.0])


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (100, -0.5), (101, -0.5), (500, -0.5)]
)
def test_overlong_penalty(length: int, penalty: float) -> None:
    """https://arxiv.org/abs/2503.14476, equation 13, with factor 0.5: maximum 100, buffer 20."""
    assert overlong_penalty(length, 100, 20, 0.5) == pytest.approx(penalty)


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("rewards", [[0.1], [0.1] * 3, [0.3] * 7])
def test_equal_rewards_give_exactly_zero(rewards: list[float], leave_one_out: bool, normalize_std: bool) -> None:
    ids = range(len(rewards))
    got = shape_group_rewards(
        rewards, [0] * len(rewards), ids, normalize_std=normalize_std, leave_one_out=leave_one_out
    )
    assert got == [0.0] * len(rewards)


def test_a_rollout_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout 4 has samples in groups 0 and 1"):
        shape_group_rewards([1, 1], [0, 1], [4, 4], normalize_std=False)


def test_unequal_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards, 1 group ids"):
        shape_group_rewards([1, 1], [0], [4, 5], normalize_std=False)


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3)), min_size=1, max_size=20), st.randoms())
def test_order_does_not_matter(rows: list[tuple[float, int]], random: object) -> None:
    ids = list(range(len(rows)))
    got = shape_group_rewards([r for r, _ in rows], [g for _, g in rows], ids, normalize_std=True)
    order = list(ids)
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = shape_group_rewards([rows[i][0] for i in order], [rows[i][1] for i in order], order, normalize_std=True)
    assert [shuffled[order.index(i)] for i in ids] == pytest.approx(got, abs=1e-6)
