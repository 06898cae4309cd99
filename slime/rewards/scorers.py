"""Graders as plain functions, under the names that reward functions of users import.

They run where they are called, without a time-out: in code that must not hang, call ``async_rm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from slime.rewards.gpqa import grade_gpqa
from slime.rewards.grade import Deferred, Grade
from slime.rewards.latex import last_boxed, normalize
from slime.rewards.math import compare, grade_deepscaler, grade_math
from slime.rewards.rules import INVALID, grade_dapo, score_strict_box
from slime.worker_process import resolve

__all__ = [
    "compute_gpqa_reward",
    "compute_score",
    "extract_answer",
    "extract_boxed_answer",
    "get_deepscaler_rule_based_reward",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
]


def _settle(grade: Grade | Deferred) -> float:
    if isinstance(grade, Deferred):
        grade = grade.if_true if resolve(grade.function)(*grade.arguments) else grade.if_false
    return float(cast(float, grade.reward))


def extract_answer(passage: str) -> str | None:
    r"""Content of the last ``\boxed{}``; None without one."""
    return last_boxed(passage)


extract_boxed_answer = extract_answer


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Whether two answers have the same normal form."""
    return normalize(given_answer) == normalize(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Whether two answers are equal as text, as numbers or as expressions."""
    decision = compare(given_answer, ground_truth)
    if isinstance(decision, bool):
        return decision
    from slime.rewards.symbolic import all_equal  # half a second of import that most answers need not pay

    return all_equal(decision)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether the last ``\boxed{}`` of a response equals the label: the rule of ``math``."""
    return _settle(grade_math(solution_str, ground_truth, {})) == 1.0


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 or 0 by the rule of ``deepscaler``."""
    return int(_settle(grade_deepscaler(response, label, {})))


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """The reward of ``dapo``: ``{"score": 1 or -1, "acc", "pred"}``.

    Args:
        solution_str: The response.
        ground_truth: The label.
        strict_box_verify: Compare the exact content of the last box instead of the ``Answer:`` line.
    """
    if strict_box_verify:
        score, pred = score_strict_box(solution_str, ground_truth)
        return {"score": score, "acc": score > 0, "pred": None if pred == INVALID else pred}
    return dict(cast(Mapping[str, Any], grade_dapo(solution_str, ground_truth, {}).reward))


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1 or 0 by the rule of ``gpqa``; 0 without a response."""
    return _settle(grade_gpqa(response, label, metadata or {})) if response is not None else 0.0
