"""Advantage estimators against token-by-token recursions in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime.algorithms import ALGORITHMS
from slime.algorithms.advantages import (
    AdvantageInputs,
    discounted_sums,
    generalized_advantages,
    reverse_kl,
)


def plain_sums(x: Tensor, discount: float) -> list[float]:
    out: list[float] = []
    following = 0.0
    for value in reversed(x.double().tolist()):
        following = value + discount * following
        out.append(following)
    return out[::-1]


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
@pytest.mark.parametrize(("length", "chunk"), [(0, 4), (1, 4), (7, 3), (300, 128), (256, 128)])
def test_chunked_scan_equals_the_recursion(discount: float, length: int, chunk: int) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length))
    got = discounted_sums(x, discount, chunk)
    torch.testing.assert_close(
        got.double(), torch.tensor(plain_sums(x, discount), dtype=torch.float64), atol=1e-4, rtol=1e-4
    )


def inputs(**changes: object) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 3)
    masks = [torch.tensor([1.0, 0, 1, 1, 0]), torch.ones(3)]
    values: dict[str, object] = {
        "rewards": [2.0, -1.0],
        "kl": [torch.randn(n, generator=generator) for n in lengths],
        "masks": masks,
        "kl_coef": 0.5,
        "gamma": 0.9,
        "lambd": 0.8,
    }
    return AdvantageInputs(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_group_estimators_broadcast_the_reward(name: str) -> None:
    got = ALGORITHMS[name].estimate(inputs())
    assert [row.tolist() for row in got.advantages] == [[2.0] * 5, [-1.0] * 3]
    assert [row.tolist() for row in got.returns] == [[2.0] * 5, [-1.0] * 3]


def test_reinforce_plus_plus() -> None:
    given = inputs()
    got = ALGORITHMS["reinforce_plus_plus"].estimate(given)
    for i, last in enumerate((3, 2)):  # the last unmasked token
        token_rewards = torch.where(given.masks[i].bool(), -0.5 * given.kl[i], 0.0)
        token_rewards[last] += given.rewards[i]
        assert got.advantages[i].tolist() == pytest.approx(plain_sums(token_rewards, 0.9), abs=1e-5)


def test_reinforce_plus_plus_gives_a_fully_masked_sample_nothing() -> None:
    got = ALGORITHMS["reinforce_plus_plus"].estimate(inputs(masks=[torch.ones(5), torch.zeros(3)]))
    assert got.advantages[0].abs().min() > 0
    assert got.advantages[1].tolist() == [0.0] * 3


def test_reinforce_plus_plus_baseline() -> None:
    given = inputs()
    got = ALGORITHMS["reinforce_plus_plus_baseline"].estimate(given)
    for row, reward, kl in zip(got.advantages, given.rewards, given.kl, strict=True):
        torch.testing.assert_close(row, reward - 0.5 * kl)


def test_generalized_advantages_equal_the_recursion() -> None:
    generator = torch.Generator().manual_seed(5)
    given = inputs(values=[torch.randn(5, generator=generator), torch.randn(3, generator=generator)])
    got = generalized_advantages(given)
    assert given.values is not None
    for i in range(2):
        kl, values = given.kl[i].double().tolist(), given.values[i].double().tolist()
        following_advantage = following_value = 0.0
        want: list[float] = []
        for t in reversed(range(len(kl))):
            reward = -0.5 * kl[t] + (given.rewards[i] if t == len(kl) - 1 else 0.0)
            delta = reward + 0.9 * following_value - values[t]
            following_advantage = delta + 0.9 * 0.8 * following_advantage
            following_value = values[t]
            want.append(following_advantage)
        assert got.advantages[i].tolist() == pytest.approx(want[::-1], abs=1e-5)
        torch.testing.assert_close(got.returns[i], got.advantages[i] + given.values[i])


def test_ppo_without_values_says_so() -> None:
    with pytest.raises(ValueError, match="critic values"):
        generalized_advantages(inputs())


def test_distillation_term() -> None:
    student, teacher = torch.tensor([-1.0, -2, -3, float("-inf")]), torch.tensor([-0.5, -4, float("-inf"), 0])
    assert reverse_kl(student, teacher, torch.tensor([1.0, 1, 0, 0])).tolist() == [-0.5, 2.0, 0.0, 0.0]
