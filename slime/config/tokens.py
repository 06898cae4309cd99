"""A command line as flag groups, and the values of slime's own flags.

A group is a flag with the values up to the next flag. Abbreviations are never resolved. Nothing here
raises for a user's mistake: problems are collected so that all of them are reported together.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime.config.flags import FlagSpec, value_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagGroup:
    """One flag as written, with its values."""

    flag: str
    values: tuple[str, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        """Flag and values as separate tokens."""
        return (self.flag, *self.values)


def group_tokens(argv: Sequence[str]) -> tuple[list[FlagGroup], list[str]]:
    """Cut a command line into groups.

    A token that starts with ``--`` opens a group; ``--flag=value`` gives it a first value, which is
    also how a value that itself starts with ``--`` is written.

    Returns:
        The groups in order, and the problems found.
    """
    groups: list[FlagGroup] = []
    stray: list[str] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            flag, equals, value = token.partition("=")
            groups.append(FlagGroup(flag=flag, values=(value,) if equals else ()))
        elif token == "-h":
            groups.append(FlagGroup(flag="--help", values=()))
        elif groups:
            last = groups[-1]
            groups[-1] = FlagGroup(flag=last.flag, values=(*last.values, token))
        else:
            stray.append(token)
    problems = (
        [f"unexpected {' '.join(stray)!r} before the first flag; every value belongs to a --flag"] if stray else []
    )
    return groups, problems


def unknown_flag(flag: str, known: Collection[str]) -> str:
    """The message for a flag that no family has, with the nearest names.

    Args:
        flag: As written.
        known: Flags of all families.
    """
    near = difflib.get_close_matches(flag, known, n=3, cutoff=0.7)
    if near:  # a distant second only distracts from a close first
        best = difflib.SequenceMatcher(None, near[0], flag).ratio()
        near = [n for n in near if difflib.SequenceMatcher(None, n, flag).ratio() > best - 0.06]
    underscored = flag.replace("_", "-")
    if underscored != flag and underscored in known:
        near = [underscored]
    extended = sorted((k for k in known if k.startswith(flag)), key=len)[:3]
    names = near or extended
    hint = f"did you mean {' or '.join(names)}?" if names else "see --help and docs/flags.md for the flags that exist"
    return f"unknown flag {flag}; {hint}"


def read_values(
    groups: Iterable[FlagGroup], specs: Mapping[str, FlagSpec]
) -> tuple[dict[str, Any], frozenset[str], list[str]]:
    """Values of slime's flags.

    A repeated flag replaces its earlier value, unless it accumulates.

    Args:
        groups: Groups whose flag is in ``specs``.
        specs: Flag (every spelling) -> spec.

    Returns:
        Values by field name, the field names the user gave (unusable values included), the problems.
    """
    values: dict[str, Any] = {}
    given: set[str] = set()
    problems: list[str] = []
    for group in groups:
        spec = specs[group.flag]
        given.add(spec.dest)
        try:
            value = _convert(spec, group)
        except ValueError as error:
            problems.append(str(error))
            continue
        wrong = value_problem(spec, value)
        if wrong is not None:
            problems.append(wrong)
        elif spec.form == "append":
            values[spec.dest] = (*values.get(spec.dest, ()), *value)
        else:
            values[spec.dest] = value
    return values, frozenset(given), problems


def _convert(spec: FlagSpec, group: FlagGroup) -> Any:
    """The value of one group.

    Raises:
        ValueError: With the message for the user.
    """
    values = group.values
    if spec.form in ("on", "off", "pair"):
        if len(values) > 0:
            raise ValueError(f"{group.flag} takes no value, found {' '.join(values)!r}; its presence is the setting")
        return not (spec.form == "off" or group.flag != spec.name)
    if len(values) == 0:
        raise ValueError(f"{group.flag} needs {_wanted(spec)}, found nothing after it")
    if spec.form in ("list", "append"):
        return tuple(_scalar(spec, text) for text in values)
    if len(values) > 1:
        raise ValueError(
            f"{group.flag} takes one value, found {len(values)}: {' '.join(values)}; quote a value that contains blanks"
        )
    return _json_object(spec, values[0]) if spec.form == "json" else _scalar(spec, values[0])


def _wanted(spec: FlagSpec) -> str:
    kinds = {int: "an integer", float: "a number", dict: "a JSON object"}
    kind = kinds.get(spec.type, "a value")
    if spec.choices is not None:
        kind = f"one of {', '.join(spec.choices)}"
    return f"one or more values ({kind})" if spec.form in ("list", "append") else kind


def _scalar(spec: FlagSpec, text: str) -> Any:
    if spec.type is str:
        return text
    try:
        return spec.type(text)
    except ValueError:
        raise ValueError(f"{spec.name} needs {_wanted(spec)}, found {text!r}") from None


def _json_object(spec: FlagSpec, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{spec.name} needs a JSON object, found {text!r} ({error.msg}, column {error.colno})"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{spec.name} needs a JSON object, found {text!r}")
    return cast("dict[str, Any]", content)
