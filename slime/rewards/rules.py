"""Rules of one screen each: ``dapo``, ``f1``, ``random``."""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from typing import Any

from slime.errors import DataError
from slime.rewards.grade import Grade, Metadata
from slime.rewards.latex import last_boxed

DAPO_WINDOW_CHARS = 300
DAPO_BOX_WINDOW_CHARS = 100
INVALID = "[INVALID]"

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_DAPO_WORDS = (
    "square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|"
    "meters|meals|edges|students|multiples"
)
_DAPO_DROPPED = re.compile(rf"\\ldots|\\dots|\^\\circ|\^\{{\\circ\}}|\\mathrm\{{th\}}|\\[!; ]|{_DAPO_WORDS}|\"")
_DAPO_UNWRAPPED = re.compile(r"\\?(?:text|textbf|mbox|overline|boxed)\{([^{}]*)\}")


def grade_dapo(response: str, label: Any, metadata: Metadata) -> Grade:
    """+1 or -1 by the last ``Answer: ...`` line within the last 300 characters.

    Returns:
        A grade of ``{"score", "acc", "pred"}``.

    Raises:
        DataError: The sample has no label.
    """
    del metadata
    matches = _ANSWER_LINE.findall(response[-DAPO_WINDOW_CHARS:])
    return _dapo_grade(normalize_dapo(matches[-1]) if matches else INVALID, label)


def grade_dapo_answer(answer: str, label: Any, metadata: Metadata) -> Grade:
    """``grade_dapo`` for the content of a box, with or without ``Answer:`` before it."""
    del metadata
    matches = _ANSWER_LINE.findall(answer)
    return _dapo_grade(normalize_dapo(matches[-1] if matches else answer) or INVALID, label)


def score_strict_box(response: str, label: Any) -> tuple[float, str]:
    """Score and prediction by the exact content of the last box in the last 100 characters."""
    pred = last_boxed(response[-DAPO_BOX_WINDOW_CHARS:])
    return (1.0 if pred is not None and pred == str(label) else -1.0), pred or INVALID


def _dapo_grade(pred: str, label: Any) -> Grade:
    if label is None:
        raise DataError("--rm-type dapo needs a label for every sample; name its column with --label-key")
    correct = pred == _dapo_label(label)
    reward = {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
    return Grade(reward, unparsed=pred == INVALID)


def _dapo_label(label: Any) -> str:
    """Numeric labels lose their fraction; others are normalised like a prediction."""
    try:
        return str(int(float(label)))
    except (TypeError, ValueError, OverflowError):
        return normalize_dapo(str(label))


def normalize_dapo(answer: str) -> str:
    """Normal form of a final answer: right of the last equals sign, without units and decoration.

    After the normalisation of Minerva, https://arxiv.org/abs/2206.14858, appendix D.
    """
    answer = answer.split("=")[-1].strip()
    answer = _DAPO_UNWRAPPED.sub(r"\1", _DAPO_DROPPED.sub("", re.sub(r"\b(?:an?)\s", "", answer)))
    answer = re.sub(r"frac([^{\s])([^{\s])", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{\s])", r"sqrt{\1}", answer)
    answer = re.sub(r"\\?[$%]|\s", "", answer).rstrip(".")
    bare = answer.replace(",", "")
    return bare if bare.isdigit() else answer


def normalize_f1(text: str) -> str:
    """Lower case, without punctuation and articles, blanks squeezed."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: str | None, label: Any) -> tuple[float, float, float]:
    """F1, precision and recall over token multisets; zeros when a yes/no answer differs or a side is empty."""
    zero = (0.0, 0.0, 0.0)
    if prediction is None or label is None:
        return zero
    predicted, expected = normalize_f1(prediction), normalize_f1(str(label))
    if predicted != expected and (predicted in _CLOSED_ANSWERS or expected in _CLOSED_ANSWERS):
        return zero
    left, right = predicted.split(), expected.split()
    common = (Counter(left) & Counter(right)).total()
    if common == 0:
        return zero
    precision, recall = common / len(left), common / len(right)
    return 2 * precision * recall / (precision + recall), precision, recall


def grade_f1(response: str, label: Any, metadata: Metadata) -> Grade:
    """Token F1 of response and label."""
    del metadata
    return Grade(f1_score(response, label)[0])


def grade_random(response: str, label: Any, metadata: Metadata) -> Grade:
    """0 or 1 with equal chance; the floor that any learned reward has to beat."""
    del response, label, metadata
    return Grade(float(random.randint(0, 1)))
