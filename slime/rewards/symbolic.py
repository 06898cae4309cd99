"""Equality of expressions by computer algebra. Runs in worker processes only: it may not end.

Size limits keep most hostile input out; time and memory limits of the worker catch the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import latex2sympy2_extended
import sympy

# Neither library is typed well enough to be checked.
_algebra = cast(Any, sympy)
_parse = cast(Any, latex2sympy2_extended).latex2sympy

_MAX_CHARS = 300
_UNSUPPORTED = re.compile(r"\\(?:int|sum|prod|lim|text|ldots|cdots|dots)(?![a-zA-Z])|\^\{?[^{}()]*\^|\d{30}")
_LARGE_POWER = re.compile(r"\^(?:\{\s*-?\d{4,}|\(\s*-?\d{4,}|\d{4,})|\d{4,}\s*!|!\s*!|\)\s*!")
_PROBES = (_algebra.Rational(7, 5), _algebra.Rational(13, 11), _algebra.Rational(23, 17))
_TOLERANCE = 1e-9


def all_equal(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether both expressions of every pair are equal."""
    return all(equal(answer, label) for answer, label in pairs)


def equal(answer: str, label: str) -> bool:
    """Whether two LaTeX or plain expressions have the same value; False when either cannot be read."""
    if not (_is_tractable(answer) and _is_tractable(label)):
        return False
    try:
        return _same(_parse(to_latex(answer)), _parse(to_latex(label)))
    except Exception:  # noqa: BLE001 - boundary to parser and algebra, which raise anything on odd input
        return False


def _is_tractable(text: str) -> bool:
    return len(text) <= _MAX_CHARS and not _UNSUPPORTED.search(text) and not _LARGE_POWER.search(text)


def to_latex(text: str) -> str:
    r"""Plain notation to LaTeX: ``sqrt(x)``, ``pi``, ``*``, ``**``."""
    text = re.sub(r"(?<![\\a-zA-Z])sqrt", r"\\sqrt", text)
    text = _braced_arguments(text)
    text = re.sub(r"(?<![\\a-zA-Z])(pi|infty)(?![a-zA-Z])", r"\\\1 ", text)
    text = re.sub(r"(?<![\\a-zA-Z])(sin|cos|tan|log|ln|exp)(?=[({\s])", r"\\\1", text)
    return text.replace("**", "^").replace("*", "\\cdot ")


def _braced_arguments(text: str) -> str:
    r"""``\sqrt(...)`` to ``\sqrt{...}``, brackets matched."""
    start = text.find("\\sqrt(")
    while start >= 0:
        depth, position = 0, start + 5
        while position < len(text):
            depth += (text[position] == "(") - (text[position] == ")")
            if depth == 0:
                break
            position += 1
        inside = text[start + 6 : position]
        text = f"{text[:start]}\\sqrt{{{inside}}}{text[position + 1 :]}"
        start = text.find("\\sqrt(", start + 5)
    return text


def _same(x: Any, y: Any) -> bool:
    if x == y:
        return True
    if isinstance(x, _algebra.MatrixBase) or isinstance(y, _algebra.MatrixBase):
        return _same_matrices(x, y)
    if isinstance(x, _algebra.Equality) and isinstance(y, _algebra.Equality):
        return _is_zero((x.lhs - x.rhs) - (y.lhs - y.rhs)) or _is_zero((x.lhs - x.rhs) + (y.lhs - y.rhs))
    if not (isinstance(x, _algebra.Expr) and isinstance(y, _algebra.Expr)):
        return False  # sets and relations are equal as they are or not at all
    return _is_zero(x - y)


def _same_matrices(x: Any, y: Any) -> bool:
    if not (isinstance(x, _algebra.MatrixBase) and isinstance(y, _algebra.MatrixBase)) or x.shape != y.shape:
        return False
    return all(_same(a, b) for a, b in zip(x, y, strict=True))


def _is_zero(difference: Any) -> bool:
    """Whether an expression is zero; looks at a few values first, for ``simplify`` may take very long."""
    symbols = sorted(difference.free_symbols, key=str)
    values = {symbol: _PROBES[i % len(_PROBES)] + i for i, symbol in enumerate(symbols)}
    number = _algebra.N(difference.subs(values), 30)
    if number.is_number and number.is_finite and abs(complex(number)) > _TOLERANCE:
        return False
    return bool(_algebra.simplify(difference) == 0)
