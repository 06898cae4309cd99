"""Graders as plain functions."""

import pytest

from slime.rewards.scorers import (
    compute_gpqa_reward,
    compute_score,
    extract_answer,
    get_deepscaler_rule_based_reward,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
)


def test_math() -> None:
    assert extract_answer(r"\boxed{1} \boxed{2}") == "2"
    assert grade_answer_mathd("50\\%", "50")
    assert not grade_answer_mathd("x+x", "2x")
    assert grade_answer_sympy("x+x", "2x")
    assert not grade_answer_sympy("3", "4")
    assert grade_answer_verl(r"so \boxed{2\sqrt3}", r"\sqrt{12}")
    assert not grade_answer_verl("so 5", "5")


def test_deepscaler() -> None:
    assert get_deepscaler_rule_based_reward(r"</think>\boxed{x+x}", "2x") == 1
    assert get_deepscaler_rule_based_reward(r"\boxed{1}", "1") == 0


@pytest.mark.parametrize(
    ("response", "strict", "expected"),
    [
        ("Answer: 3", False, {"score": 1.0, "acc": True, "pred": "3"}),
        (r"\boxed{3}", True, {"score": 1.0, "acc": True, "pred": "3"}),
        ("Answer: 3", True, {"score": -1.0, "acc": False, "pred": None}),
    ],
)
def test_dapo(response: str, strict: bool, expected: dict[str, object]) -> None:
    assert compute_score(response, "3", strict_box_verify=strict) == expected


def test_gpqa() -> None:
    assert compute_gpqa_reward("Answer: B", "B") == 1.0
    assert compute_gpqa_reward(None, "B") == 0.0
