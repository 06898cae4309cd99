"""``--custom-config-path``: a YAML mapping of names to values, set on top of the command line.

A flag's name changes that flag, a Megatron name becomes a Megatron token, any other name is the user's
own and reaches plug-ins through ``args``. A name that is meant for the engine or the router, or that is
nearly a flag's, is an error: it would silently do nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from slime.config.families import plain_json
from slime.config.flags import FlagSpec, value_problem
from slime.config.tokens import FlagGroup
from slime.config.yaml_file import read_yaml
from slime.errors import ConfigError

_NEARLY = 0.92
"""From this likeness on a name is taken for a misspelt flag; one wrong letter in a dozen is above it."""


@dataclass(slots=True, kw_only=True)
class CustomFile:
    """The entries of the file, by what they are.

    Attributes:
        values: Field of ours -> value.
        megatron: Megatron's flags as tokens.
        extra: The user's own names.
        problems: What is wrong with the file.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    megatron: list[FlagGroup] = field(default_factory=list[FlagGroup])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])


def read_custom_file(
    path: str,
    specs: Collection[FlagSpec],
    *,
    megatron: Collection[str],
    prefixes: Collection[str],
    own: Collection[str] = (),
) -> CustomFile:
    """Read the file and sort its entries.

    Args:
        path: The YAML file.
        specs: Flags of ours.
        megatron: Megatron's flags.
        prefixes: ``--sglang-`` and ``--router-``.
        own: Flags of the user's own parser; their names are never taken for misspelt ones.
    """
    result = CustomFile()
    where = f"--custom-config-path {path}"
    content = _read(path, where, result.problems)
    by_dest = {spec.dest: spec for spec in specs}
    known = {*by_dest, *(_name(option) for option in megatron)}
    own_names = {_name(option) for option in own}
    for entry, value in content.items():
        dest = str(entry).replace("-", "_")
        option = "--" + dest.replace("_", "-")
        prefix = next((p for p in prefixes if option.startswith(p)), None)
        if dest in by_dest:
            problem = set_value(result.values, by_dest[dest], value)
            result.problems += [] if problem is None else [f"{where}: {problem}"]
        elif option in megatron:
            result.megatron += megatron_group(option, value)
        elif prefix is not None:
            result.problems.append(f"{where}: {entry} has no effect in this file; give {option} on the command line")
        elif dest not in own_names and (near := difflib.get_close_matches(dest, known, n=1, cutoff=_NEARLY)):
            result.problems.append(
                f"{where}: unknown name {entry}; did you mean {near[0]}? Rename the entry if it is one of your own"
            )
        else:
            result.extra[dest] = value
    try:
        result.extra = plain_json(result.extra, f"{where}: entry")
    except TypeError as error:
        result.problems.append(str(error))
    return result


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _read(path: str, where: str, problems: list[str]) -> Mapping[Any, Any]:
    try:
        content = read_yaml(path, where)
    except ConfigError as error:
        problems += error.problems
        return {}
    if content is not None and not isinstance(content, Mapping):
        problems.append(f"{where}: must be a mapping of names to values")
        return {}
    return cast("Mapping[Any, Any]", content or {})


def set_value(values: dict[str, Any], spec: FlagSpec, value: Any) -> str | None:
    """Put a YAML value into ``values``; returns why it is not acceptable, or None."""
    if spec.form in ("list", "append") and value is not None:
        items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        value = tuple(items)
        right_type = all(isinstance(item, spec.type) for item in items)
    elif value is None:
        right_type = spec.default is None
    elif spec.type is float:
        right_type = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if right_type else value
    else:
        right_type = isinstance(value, spec.type) and (spec.type is bool or not isinstance(value, bool))
    if not right_type:
        return f"{spec.dest} must be {spec.type.__name__}, found {value!r}"
    problem = value_problem(spec, value)
    if problem is None:
        values[spec.dest] = value
    return problem


def megatron_group(option: str, value: Any) -> list[FlagGroup]:
    """A YAML value as the tokens of a Megatron flag; nothing for a flag that is off."""
    if value is None or value is False:
        return []
    if value is True:
        return [FlagGroup(flag=option, values=())]
    items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [FlagGroup(flag=option, values=tuple(str(item) for item in items))]
