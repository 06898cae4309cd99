"""Multiple choice: which letter a response chooses, and whether it is the right one.

Deliberately stricter than its widespread predecessor, which takes the first letter of a word for an
answer ("answer is the" chose T), prefers "Option A is wrong" to a later "Final answer: B" and finds the
label "A" in any text with the letter a.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, cast

from slime.rewards.grade import Grade, Metadata

DEFAULT_LETTERS = string.ascii_uppercase[:10]

_LETTER = r"[\(\[\{*$\s]*(?:\\(?:text|boxed|mathbf|mathrm)\s*\{\s*)*([A-Za-z])(?![A-Za-z0-9'])"
_LINK = r"\s*(?:\*\*)?\s*(?:is|are)?\s*:?"
_NOT_REJECTED = r"(?!\W*\s(?:is|are|was|would\s+be)\s+(?:not\b|wrong|incorrect|false|ruled|out))"
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\bfinal\s+(?:answer|option|choice){_LINK}{_LETTER}{_NOT_REJECTED}",
        r"(?<![A-Za-z0-9'])([A-Za-z])[\)\]\}*.]*\s+(?:is|are)\s+(?:the\s+)?correct\b",
        rf"\b(?:answer|option|choice){_LINK}{_LETTER}{_NOT_REJECTED}",
    )
)
_STANDALONE = re.compile(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])")


def normalize_text(text: str) -> str:
    """Lower case words and numbers, everything else a single blank."""
    return " ".join(re.sub(r"[^a-z0-9.+\-]+", " ", text.lower()).split())


def extract_letter(response: str, letters: Sequence[str]) -> str | None:
    """The chosen letter: the last explicit statement, else the last capital that stands alone."""
    for pattern in _PATTERNS:
        found = [match.upper() for match in pattern.findall(response) if match.upper() in letters]
        if found:
            return found[-1]
    capitals = [letter for letter in _STANDALONE.findall(response) if letter in letters]
    return capitals[-1] if capitals else None


def _choice_texts(metadata: Metadata) -> list[str]:
    choices: Any = metadata.get("choices")
    if isinstance(choices, Mapping):
        choices = list(cast(Mapping[str, Any], choices).values())
    return [str(choice) for choice in cast(Sequence[Any], choices)] if choices else []


def _valid_letters(metadata: Metadata, num_choices: int) -> list[str]:
    given: Any = metadata.get("valid_letters")
    if given:
        return [str(letter).upper() for letter in given]
    return list(string.ascii_uppercase[:num_choices] if num_choices else DEFAULT_LETTERS)


def _correct_letter(label: Any, metadata: Metadata, letters: list[str], choices: list[str]) -> str | None:
    """The right letter: named by the metadata, an index, a letter, or the text of a choice."""
    named: Any = metadata.get("correct_letter")
    if isinstance(label, int | float) and not isinstance(label, bool):
        index = int(label)
        return letters[index] if 0 <= index < len(letters) else None
    if isinstance(named, str) and named.strip():
        return named.strip().upper()
    text = str(label).strip() if label is not None else ""
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    wanted = normalize_text(text)
    for letter, choice in zip(letters, choices, strict=False):  # letters may outnumber the choices
        if wanted and normalize_text(choice) == wanted:
            return letter
    return None


def grade_gpqa(response: str, label: Any, metadata: Metadata) -> Grade:
    """1 if the response chooses the right letter, or states the right answer's text, else 0."""
    part = response.rsplit("</think>", 1)[-1]
    choices = _choice_texts(metadata)
    letters = _valid_letters(metadata, len(choices))
    chosen = extract_letter(part, letters)
    correct = _correct_letter(label, metadata, letters, choices)
    if chosen is not None and correct is not None:
        return Grade(float(chosen == correct))
    stated = f" {normalize_text(part)} "
    targets = [metadata.get("correct_answer"), metadata.get("answer_text"), label]
    if correct is not None and correct in letters[: len(choices)]:
        targets.append(choices[letters.index(correct)])
    for target in targets:
        wanted = normalize_text(target) if isinstance(target, str) else ""
        # A single character is in almost any text.
        if len(wanted) > 1 and f" {wanted} " in stated:
            return Grade(1.0)
    matches_label = chosen is not None and isinstance(label, str) and chosen == label.strip().upper()
    return Grade(float(matches_label), unparsed=chosen is None)
