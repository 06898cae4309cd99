r"""Mathematical answers: textual comparison here, symbolic comparison deferred to a worker process.

Owns ``math`` and ``deepscaler``. What a comparison of texts and rational numbers can decide is decided
without a computer algebra system; only the rest is deferred. Tests hold the table of example answers.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd
from typing import Any

from slime.errors import DataError
from slime.rewards.grade import Deferred, Grade, Metadata
from slime.rewards.latex import BOX, MAX_COMPARED_CHARS, last_boxed, normalize, outer_brackets, split_top_level

SYMBOLIC = "slime.rewards.symbolic:all_equal"
NO_BOX = "a response without \\boxed{} gets reward 0"
NO_MARKER = (
    "a response without </think> or ###Response gets reward 0 from deepscaler; if the model does not think "
    "aloud, use --rm-type math"
)
NO_LABEL = "a sample without label gets reward 0; name the label column with --label-key"

_NUMBER = re.compile(r"^[-+]?\d+(?:\.\d+)?$")
_INTEGER = re.compile(r"^[-+]?\d+$")
_FRACTION = re.compile(r"^(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}$")
_MIXED = re.compile(r"^(-?)(\d+)[-+]\\frac\{(\d+)\}\{(\d+)\}$")
_WORDS = re.compile(r"^[A-Za-z]+$")
_RIGHT, _WRONG = Grade(1.0), Grade(0.0)


def grade_math(response: str, label: Any, metadata: Metadata) -> Grade | Deferred:
    r"""1 if the last ``\boxed{}`` of the response equals the label, else 0; a falsy label gives 0."""
    del metadata
    if not label:
        return Grade(0.0, note=NO_LABEL) if label is None or label == "" else _WRONG
    return _grade_box(response, label)


def grade_answer(answer: str, label: Any, metadata: Metadata) -> Grade | Deferred:
    """Like ``grade_math`` for an answer that has been taken out of its box."""
    del metadata
    if not label:
        return Grade(0.0, note=NO_LABEL) if label is None or label == "" else _WRONG
    return _compare(answer, label)


def grade_deepscaler(response: str, label: Any, metadata: Metadata) -> Grade | Deferred:
    """Like ``grade_math`` on what follows the thinking; 0 when nothing marks its end.

    Raises:
        DataError: The sample has no label.
    """
    del metadata
    if label is None:
        raise DataError("--rm-type deepscaler needs a label for every sample; name its column with --label-key")
    if label == "":
        return Grade(0.0, note=NO_LABEL)
    if "</think>" in response:
        part = response.rsplit("</think>", 1)[1]
    elif "###Response" in response:
        part = response.split("###Response")[1]
    else:
        return Grade(0.0, unparsed=True, note=NO_MARKER)
    return _grade_box(part, label)


def _grade_box(text: str, label: Any) -> Grade | Deferred:
    answer = last_boxed(text)
    return Grade(0.0, unparsed=True, note=NO_BOX) if answer is None else _compare(answer, label)


def _compare(answer: str, label: Any) -> Grade | Deferred:
    expected: str | None = str(label)
    if BOX in expected:
        expected = last_boxed(expected)
    if expected is None:
        return _WRONG
    decision = compare(answer, expected)
    if isinstance(decision, bool):
        return _RIGHT if decision else _WRONG
    return Deferred(function=SYMBOLIC, arguments=(decision,), if_true=_RIGHT, if_false=_WRONG)


def compare(answer: str, label: str) -> bool | list[tuple[str, str]]:
    """Whether an answer equals a label, or the pairs of parts that only algebra can decide on."""
    a, b = normalize(answer), normalize(label)
    if not a or not b:
        return False
    if a == b:
        return True
    if max(len(a), len(b)) > MAX_COMPARED_CHARS:
        return False
    parts_a, parts_b = _parts(a), _parts(b)
    if parts_a[0] != parts_b[0] or len(parts_a[1]) != len(parts_b[1]):
        return False
    undecided: list[tuple[str, str]] = []
    for part, expected in zip(parts_a[1], parts_b[1], strict=True):
        decided = _decide(normalize(part), normalize(expected))
        if decided is False:
            return False
        if decided is None:
            undecided.append((normalize(part), normalize(expected)))
    return undecided or True


def _parts(text: str) -> tuple[tuple[str, str], list[str]]:
    """Brackets and elements of a tuple, an interval or a list; anything else is one element."""
    if "\\begin" in text:
        return ("", ""), [text]
    outer = outer_brackets(text)
    if outer is not None:
        elements = split_top_level(outer[1])
        if len(elements) > 1:
            return (outer[0], outer[2]), elements
    return ("", ""), split_top_level(text)


def _decide(a: str, b: str) -> bool | None:
    """Whether answer ``a`` equals label ``b``; None if texts and rational numbers cannot tell."""
    if a == b:
        return True
    if not a or not b:
        return False
    if _WORDS.match(a) and _WORDS.match(b):
        return a.casefold() == b.casefold()
    x, y = _rational(a), _rational(b)
    if x is not None and y is not None:
        if _NUMBER.match(a) and _NUMBER.match(b):
            return x == y
        if _FRACTION.match(a) and _is_reduced_fraction(b):
            return x == y and _denominator(a) == _denominator(b)
    if _INTEGER.match(a) or _INTEGER.match(b):
        return False  # an integer is only given as itself: 2^{10} does not answer 1024
    if x is not None and y is not None:
        return x == y
    return None


def _rational(text: str) -> Fraction | None:
    if _NUMBER.match(text):
        return Fraction(text)
    if match := _FRACTION.match(text):
        top, bottom = int(match[2]), int(match[3])
        return Fraction(-top if match[1] else top, bottom) if bottom else None
    if match := _MIXED.match(text):
        bottom = int(match[4])
        value = int(match[2]) + Fraction(int(match[3]), bottom) if bottom else None
        return -value if value is not None and match[1] else value
    return None


def _denominator(text: str) -> int:
    match = _FRACTION.match(text)
    return abs(int(match[3])) if match else 1


def _is_reduced_fraction(text: str) -> bool:
    match = _FRACTION.match(text)
    return match is not None and gcd(int(match[2]), int(match[3])) == 1
