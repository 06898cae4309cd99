"""Multiple choice: the example table, and where this grader is deliberately stricter."""

from typing import Any

import pytest

from slime.rewards.gpqa import DEFAULT_LETTERS, extract_letter, grade_gpqa


@pytest.mark.parametrize(
    ("response", "label", "metadata", "score"),
    [
        ("Final answer: C", "C", {}, 1),
        ("(B)", "B", {}, 1),
        ("Answer: B", 1, {}, 1),
        ("The answer is D", "A", {"correct_letter": "D"}, 1),
        ("Final answer: C", "D", {}, 0),
        ("</think> Final answer: C", "C", {}, 1),
        ("Answer: A </think> Answer: B", "B", {}, 1),
        ("answer: b", "B", {}, 1),
        ("**Answer:** B", "B", {}, 1),
        (r"Answer: \boxed{B}", "B", {}, 1),
        ("I choose the second: 4 apples", "B", {"choices": ["3 apples", "4 apples"]}, 1),
        ("Answer: B", "4 apples", {"choices": {"x": "3 apples", "y": "4 apples"}}, 1),
        ("it is 4 apples", "4 apples", {"choices": ["3 apples", "4 apples"]}, 1),
        ("it is 14 apples", "4 apples", {"choices": ["3 apples", "4 apples"]}, 0),
        ("it is helium", None, {"correct_answer": "Helium"}, 1),
        ("Answer: C", "C", {"choices": ["a", "b"]}, 0),
        ("", "A", {}, 0),
        # deliberate: the explicit final answer wins over a rejected option
        ("Option A is wrong. Final answer: B", "B", {}, 1),
        ("Option A is wrong, so option B", "B", {}, 1),
        # deliberate: an answer outside the letters is not found in the letter "a" of some word
        ("The answer is K", "A", {}, 0),
        # deliberate: the first letter of a word is no answer
        ("The choice is correct: B is the correct one", "B", {}, 1),
        ("The answer is the second one", "T", {"valid_letters": ["S", "T"]}, 0),
    ],
)
def test_table(response: str, label: Any, metadata: dict[str, Any], score: int) -> None:
    assert grade_gpqa(response, label, metadata).reward == score


def test_last_statement_wins() -> None:
    assert extract_letter("Answer: A. No, answer: B", DEFAULT_LETTERS) == "B"
    assert extract_letter("Is it A or C? I say D", DEFAULT_LETTERS) == "D"
    assert extract_letter("nothing here", DEFAULT_LETTERS) is None


def test_no_letter_is_counted() -> None:
    assert grade_gpqa("no idea", "A", {}).unparsed
    assert not grade_gpqa("A", "A", {}).unparsed
