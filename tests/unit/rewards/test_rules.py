"""dapo, f1 and random against their example tables."""

from typing import Any

import pytest

from slime.errors import DataError
from slime.rewards.rules import (
    f1_score,
    grade_dapo,
    grade_dapo_answer,
    grade_f1,
    grade_random,
    normalize_dapo,
    score_strict_box,
)


@pytest.mark.parametrize(
    ("response", "label", "score", "pred"),
    [
        ("Answer: 34", "34", 1, "34"),
        ("answer : $34$", "34", 1, "34"),
        ("Answer: 1\nAnswer: 34", "34", 1, "34"),
        ("Answer: 34.0", "34", -1, "34.0"),
        ("Answer: 34", 34.0, 1, "34"),
        ("Answer: 34", "34.0", 1, "34"),
        ("Answer: 7", 7.9, 1, "7"),
        ("**Answer:** 34", "34", -1, "**34"),
        (r"\boxed{34}", "34", -1, "[INVALID]"),
        ("Answer: 34" + " " * 400, "34", -1, "[INVALID]"),
        ("Answer: 1,234", "1234", 1, "1234"),
        ("Answer: 34.", "34", 1, "34"),
        ("Answer: x = 34 dollars", "34", 1, "34"),
        (r"Answer: \text{blue}", "blue", 1, "blue"),
        (r"Answer: \frac12", r"\frac{1}{2}", 1, r"\frac{1}{2}"),
        ("Answer: 5", "inf", -1, "5"),
    ],
)
def test_dapo_table(response: str, label: Any, score: int, pred: str) -> None:
    grade = grade_dapo(response, label, {})
    assert grade.reward == {"score": float(score), "acc": score == 1, "pred": pred}
    assert grade.unparsed == (pred == "[INVALID]")


def test_dapo_of_a_box_reads_its_content() -> None:
    assert grade_dapo_answer("34", "34", {}).reward == {"score": 1.0, "acc": True, "pred": "34"}
    assert grade_dapo_answer("Answer: 34", "34", {}).reward == {"score": 1.0, "acc": True, "pred": "34"}
    assert grade_dapo_answer("", "34", {}).reward == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


def test_dapo_needs_labels() -> None:
    with pytest.raises(DataError, match=r"--label-key"):
        grade_dapo("Answer: 1", None, {})


def test_dapo_normal_form_is_stable() -> None:
    for text in ("3,000 km", r"$\frac34$", "an apple", r"\sqrt2"):
        once = normalize_dapo(text)
        assert normalize_dapo(once) == once


def test_strict_box() -> None:
    assert score_strict_box(r"so \boxed{34}", "34") == (1.0, "34")
    assert score_strict_box(r"so \boxed{34.0}", "34") == (-1.0, "34.0")
    assert score_strict_box(r"\boxed{34}" + " " * 100, "34") == (-1.0, "[INVALID]")


@pytest.mark.parametrize(
    ("answer", "label", "score"),
    [
        ("The cat sat", "a cat sat down", 0.8),
        ("New York City", "new york", 0.8),
        ("yes", "no", 0),
        ("yes", "yes", 1),
        ("", "x", 0),
        ("yes it is", "yes", 0),
        ("one one two", "one two two", 2 / 3),  # a multiset: each token counts as often as both have it
        ("42", 42, 1),
        ("x", None, 0),
    ],
)
def test_f1_table(answer: str, label: Any, score: float) -> None:

    assert grade_f1(answer, label, {}).reward == pytest.approx(score)


def test_f1_parts() -> None:
    assert f1_score("one two", "one") == pytest.approx((2 / 3, 0.5, 1.0))
    assert f1_score(None, "x") == (0.0, 0.0, 0.0)


def test_random_takes_both_values() -> None:
    assert {grade_random("", None, {}).reward for _ in range(200)} == {0.0, 1.0}
