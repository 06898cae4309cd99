"""Reading answers out of LaTeX: the last box, and a normal form of what is in it.

Text only; every step is linear in the length of the text, at about 0.1 microseconds per character.
Tests hold: the normal form does not change when it is taken twice.
"""

from __future__ import annotations

import re

BOX = "\\boxed"

MAX_COMPARED_CHARS = 2000
"""Longer answers are only compared as they are."""

_UNICODE = str.maketrans(
    {
        "π": "\\pi ",
        "√": "\\sqrt",
        "×": "\\times ",
        "·": "\\cdot ",
        "−": "-",
        "–": "-",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "°": "",
        "～": "~",
    }
)
_SPACING = re.compile(r"(?<!\\)\\[!,;: ]|\\q?quad(?![a-zA-Z])|~")
_SIZING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\s*(?:\{\s*)?\\circ(?:\s*\})?|\\degree(?![a-zA-Z])")
_CURRENCY = re.compile(r"\\?[$%]")
_FRACTION_NAMES = re.compile(r"\\[tdc]frac(?![a-zA-Z])")
_CONNECTIVE = re.compile(r"\\text\s*\{\s*(?:or|and)\s*\}|(?<=[\s\d}])(?:or|and)(?=\s)", re.IGNORECASE)
_TRAILING_TEXT = re.compile(r"(?<=\S)\s*\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]*\}\s*(?:\^\s*\{?\d\}?)?$")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|textit|mathit|operatorname)\s*\{([^{}]*)\}")
_UNIT_WORDS = (
    "degrees?|[mck]?m|[cmk]?meters?|centimeters?|kilometers?|miles?|feet|foot|ft|inch(?:es)?|yards?|"
    "seconds?|sec|minutes?|min|hours?|hrs?|days?|weeks?|months?|years?|kg|grams?|mph|dollars?|cents?|percent|"
    "units?|people|students?|points?|ways?"
)
_UNIT = re.compile(rf"(?<=[\d}})])\s+(?:square\s+|cubic\s+|sq\.?\s*)?(?:{_UNIT_WORDS})\.?\s*(?:\^\s*\{{?\d\}}?)?$")
_GLUED_UNIT = re.compile(r"(?<=\d)(?:cm|mm|km|kg|mph|ft)$")
_BARE_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))")
_BARE_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_SLASH = re.compile(r"^(-?)(\d+)\s*/\s*(\d+)$")
_MIXED = re.compile(r"^(-?)(\d+)\s*(?:\s(\d+)\s*/\s*(\d+)|\\frac\{(\d+)\}\{(\d+)\})$")
_LEADING_POINT = re.compile(r"(?<![\d}])\.(?=\d)")
_THOUSANDS = re.compile(r"^-?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, braces matched; None if there is none or it is not closed."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    open_at = start + len(BOX)
    while open_at < len(text) and text[open_at] == " ":
        open_at += 1
    if open_at >= len(text) or text[open_at] != "{":
        return None
    depth, position = 0, open_at
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[open_at + 1 : position]
        position += 1
    return None


def normalize(text: str) -> str:
    """The normal form of one answer; answers that only differ in notation have the same one.

    Longer texts than any sensible answer only lose their blanks.
    """
    if len(text) > MAX_COMPARED_CHARS:
        return re.sub(r"\s+", "", text)
    text = _SIZING.sub("", text.translate(_UNICODE).replace("{,}", ",").replace("\n", " "))
    text = _DEGREES.sub("", _CURRENCY.sub("", _SPACING.sub(" ", text)))
    text = _FRACTION_NAMES.sub(r"\\frac", text).strip().removesuffix(".").strip()
    text = _CONNECTIVE.sub(",", text)
    text = _TEXT.sub(r"\1", _TRAILING_TEXT.sub("", text)).strip()
    text = _GLUED_UNIT.sub("", _UNIT.sub("", text))
    text = _BARE_FRACTION.sub(_braced_fraction, text)
    text = _LEADING_POINT.sub("0.", _BARE_ROOT.sub(r"\\sqrt{\1}", text))
    text = _short_side_dropped(text)
    if _THOUSANDS.match(text):
        text = text.replace(",", "")
    text = _MIXED.sub(_mixed_sum, _SLASH.sub(r"\1\\frac{\2}{\3}", text.strip()))
    return re.sub(r"\s+", "", text)


def _braced_fraction(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2] or "", match[3] or match[4] or ""
    return f"\\frac{{{top}}}{{{bottom}}}"


def _mixed_sum(match: re.Match[str]) -> str:
    sign, whole, top, bottom = match[1], match[2], match[3] or match[5], match[4] or match[6]
    return f"{sign}{whole}{sign or '+'}\\frac{{{top}}}{{{bottom}}}"


def _short_side_dropped(text: str) -> str:
    """``x = 5`` to ``5``: what is left of a single equals sign goes if it is a short name."""
    left, sign, right = text.partition("=")
    if sign and "=" not in right and 0 < len(left.strip()) <= 2 and not left.strip().isdigit():
        return right.strip()
    return text


def split_top_level(text: str) -> list[str]:
    """Parts between commas that are in no bracket."""
    parts, depth, start = list[str](), 0, 0
    for position, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return parts


def outer_brackets(text: str) -> tuple[str, str, str] | None:
    """``(opening, inside, closing)`` if one round or square pair encloses everything (kinds may be mixed)."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth = 0
    for position, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0 and position < len(text) - 1:
                return None
    return text[0], text[1:-1], text[-1]
