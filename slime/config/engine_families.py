"""The engine's and the router's flags: by their own parsers where installed, else by recorded tables.

Both forms implement ``families.PrefixFamily``: the prefix is taken off, values come back under the
foreign attribute names, and only what the user gave comes back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slime.config.engine_flags import SGLANG_ALIASES, SGLANG_FLAGS, SGLANG_OWNED, Kind
from slime.config.router_flags import ROUTER_CHOICES, ROUTER_FLAGS, ROUTER_OWNED
from slime.config.tokens import unknown_flag
from slime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFamily:
    """A family of prefixed flags described by a table.

    Attributes:
        prefix: With dashes, for example ``--sglang-``.
        table: Attribute name -> kind.
        aliases: Other spelling of an attribute -> attribute name.
        owned: Attribute that slime sets -> what the user changes instead.
        choices: Attribute -> accepted values, where they are known.
    """

    prefix: str
    table: Mapping[str, Kind]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    owned: Mapping[str, str] = field(default_factory=dict[str, str])
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def flag_names(self) -> frozenset[str]:
        """Every accepted flag, with the prefix."""
        return frozenset(self.prefix + name.replace("_", "-") for name in (*self.table, *self.aliases))

    def refused(self) -> Mapping[str, str]:
        """Flags that slime sets itself -> what to use instead."""
        return {self.prefix + name.replace("_", "-"): hint for name, hint in self.owned.items()}

    def parse(self, groups: Sequence[Sequence[str]], *, known: Collection[str] = ()) -> dict[str, Any]:
        """Values by attribute name; see ``PrefixFamily.parse``.

        Raises:
            ConfigError: Unknown flags and unusable values, all of them.
        """
        problems: list[str] = []
        result: dict[str, Any] = {}
        for flag, *values in groups:
            name = flag.removeprefix(self.prefix).replace("-", "_")
            turned_off = False
            if name.startswith("no_") and self.table.get(name[3:]) == "pair":
                name, turned_off = name[3:], True
            name = self.aliases.get(name, name)
            if name not in self.table or "_" in flag:
                problems.append(unknown_flag(flag, known or self.flag_names()))
                continue
            try:
                result[name] = not turned_off if turned_off else self._value(flag, name, values)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(problems)
        return result

    def _value(self, flag: str, name: str, values: Sequence[str]) -> Any:
        kind = self.table[name]
        if kind in ("flag", "pair"):
            if values:
                raise ValueError(f"{flag} takes no value, found {' '.join(values)!r}")
            return True
        if not values:
            raise ValueError(f"{flag} needs a value ({kind}), found nothing after it")
        if kind.endswith("*"):
            return [_scalar(flag, kind[:-1], text) for text in values]
        if len(values) > 1:
            raise ValueError(f"{flag} takes one value, found {len(values)}: {' '.join(values)}")
        accepted = self.choices.get(name)
        if accepted is not None and values[0] not in accepted:
            raise ValueError(f"{flag} {values[0]}: accepted values are {', '.join(accepted)}")
        return _scalar(flag, kind, values[0])


def _scalar(flag: str, kind: str, text: str) -> Any:
    readers: Mapping[str, Any] = {"int": int, "float": float, "json": json.loads}
    names = {"int": "an integer", "float": "a number", "json": "JSON"}
    if kind not in readers:
        return text
    try:
        return readers[kind](text)
    except ValueError:
        raise ValueError(f"{flag} needs {names[kind]}, found {text!r}") from None


class _StrictParser(argparse.ArgumentParser):
    """Raises instead of ending the process; sets only what the command line has."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def strict_parser() -> argparse.ArgumentParser:
    """A parser for ``ArgparseFamily``: no abbreviations, no ``--help``, no exit."""
    return _StrictParser(prog="slime", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgparseFamily:
    """A family of flags described by the foreign package's own argparse parser.

    Attributes:
        prefix: With dashes; empty for flags of a user's own parser.
        parser: Made by ``strict_parser`` and filled by the package, without prefix.
        owned: Attribute that slime sets -> what the user changes instead.
        renamed: Attribute of the parser -> attribute of the package's Python API.
        choices: Attribute -> accepted values, where slime accepts other ones than the parser.
        older: Flag without dashes that the parser may no longer know -> tokens in its place, the first a flag.
    """

    prefix: str
    parser: argparse.ArgumentParser
    owned: Mapping[str, str] = field(default_factory=dict[str, str])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    older: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def __post_init__(self) -> None:
        for action in self.parser._actions:  # pyright: ignore[reportPrivateUsage]
            action.default = argparse.SUPPRESS
            action.required = False  # what the package needs slime gives, later
            if action.dest in self.choices:
                action.choices = self.choices[action.dest]

    def _options(self) -> list[str]:
        actions = self.parser._actions  # pyright: ignore[reportPrivateUsage]
        return [option for action in actions for option in action.option_strings if option.startswith("--")]

    def flag_names(self) -> frozenset[str]:
        """Every accepted flag, with the prefix."""
        refused = self.refused()
        options = set(self._options())
        older = [f"--{name}" for name, (present, *_) in self.older.items() if f"--{present}" in options]
        return frozenset(name for o in (*options, *older) if (name := self._with_prefix(o)) not in refused)

    def _with_prefix(self, option: str) -> str:
        return self.prefix + option[2:] if self.prefix else option

    def refused(self) -> Mapping[str, str]:
        """Flags that slime sets itself -> what to use instead."""
        return {(self.prefix or "--") + name.replace("_", "-"): hint for name, hint in self.owned.items()}

    def parse(self, groups: Sequence[Sequence[str]], *, known: Collection[str] = ()) -> dict[str, Any]:
        """Values by attribute name; see ``PrefixFamily.parse``.

        Raises:
            ConfigError: Unknown flags and unusable values, all of them.
        """
        accepted, options = self.flag_names(), set(self._options())
        problems: list[str] = []
        result: dict[str, Any] = {}
        for flag, *values in groups:
            if flag not in accepted:
                problems.append(unknown_flag(flag, known or accepted))
                continue
            name = flag.removeprefix(self.prefix or "--")
            option = f"--{name}"
            if option not in options:
                present, *meant = self.older[name]
                option, values = f"--{present}", [*meant, *values]
            try:
                parsed = vars(self.parser.parse_args([option, *values]))
            except (ValueError, argparse.ArgumentTypeError) as error:
                problems.append(f"{flag}: {str(error).removeprefix(f'argument {option}: ')}")
                continue
            result.update({self.renamed.get(name, name): value for name, value in parsed.items()})
        if problems:
            raise ConfigError(problems)
        return result


RECORDED_SGLANG = RecordedFamily(prefix="--sglang-", table=SGLANG_FLAGS, aliases=SGLANG_ALIASES, owned=SGLANG_OWNED)
RECORDED_ROUTER = RecordedFamily(
    prefix="--router-",
    table=ROUTER_FLAGS,
    aliases={"tls_cert_path": "server_cert_path", "tls_key_path": "server_key_path"},
    owned=ROUTER_OWNED,
    choices=ROUTER_CHOICES,
)
