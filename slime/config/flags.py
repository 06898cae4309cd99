"""One dataclass field is one flag: its type, default, help and accepted values.

Owns how a field of a section becomes a command-line flag (name, form, accepted values) and the
checks that concern a single value. It leaves out reading a command line (``tokens``) and rules that
span fields (``rules``). Tests hold: every flag name and every field name is unique over all
sections, and every field has a help text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin

from slime.errors import ConfigError

Form = Literal["value", "list", "append", "json", "on", "off", "pair", "none"]
"""How a flag is written: one value; several values; several values, repeatable and accumulating;
a JSON object; present = True; present = False; ``--x`` / ``--no-x``; not a flag (derived field)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagInfo:
    """What a field says about its flag beyond annotation and default."""

    help: str
    choices: tuple[str, ...] | None = None
    off: str | None = None
    append: bool = False
    metavar: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    derived: bool = False
    secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSpec:
    """A flag as the parser and the reference page see it."""

    name: str
    dest: str
    section: str
    form: Form
    type: type
    default: Any
    info: FlagInfo

    @property
    def choices(self) -> tuple[str, ...] | None:
        """Accepted strings, or None for any."""
        return self.info.choices

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling on a command line."""
        return (self.name, f"--no-{self.name[2:]}") if self.form == "pair" else (self.name,)


_MISSING: Any = dataclasses.MISSING


def flag(
    default: Any = None,
    *,
    doc: str,
    choices: Sequence[str] | None = None,
    off: str | None = None,
    append: bool = False,
    metavar: str | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    secret: bool = False,
) -> Any:
    """Declare a field that is a command-line flag ``--field-name``.

    Args:
        default: Value without the flag. A dict is copied for each section.
        doc: One sentence or more; shown by ``--help`` and in the reference page.
        choices: Accepted strings; a ``Literal`` annotation gives them by itself.
        off: For a field that is True by default: the flag that turns it off.
        append: The flag may be repeated and its values accumulate.
        metavar: Name of the value in ``--help``.
        at_least: Smallest accepted number.
        above: Numbers must be larger than this.
        at_most: Largest accepted number.
        secret: The value is never written anywhere.
    """
    info = FlagInfo(
        help=doc,
        choices=None if choices is None else tuple(choices),
        off=off,
        append=append,
        metavar=metavar,
        at_least=at_least,
        above=above,
        at_most=at_most,
        secret=secret,
    )
    return _field(default, info)


def derived(default: Any = None, *, doc: str) -> Any:
    """Declare a field without a flag: ``parse`` works it out from others."""
    return _field(default, FlagInfo(help=doc, derived=True))


def _field(default: Any, info: FlagInfo) -> Any:
    if isinstance(default, Mapping):
        content = dict(typing.cast("Mapping[str, Any]", default))
        return dataclasses.field(default_factory=lambda: dict(content), metadata={"flag": info})
    return dataclasses.field(default=default, metadata={"flag": info})


def words(value: Any) -> str:
    """A flag's value as written on a command line; several values are separated by blanks."""
    if isinstance(value, tuple | list):
        return " ".join(str(item) for item in typing.cast("Sequence[Any]", value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def unwrap_optional(hint: Any) -> tuple[Any, bool]:
    """``T | None`` as ``(T, True)``; any other hint as ``(hint, False)``."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        members = [m for m in get_args(hint) if m is not type(None)]
        if len(members) == 1:
            return members[0], True
    return hint, False


@functools.cache  # a pure function of the class; reading annotations takes milliseconds
def flag_specs(section: type[Section], name: str) -> tuple[FlagSpec, ...]:
    """The flags of one section, in declaration order, derived fields included (form ``none``)."""
    hints = typing.get_type_hints(section)
    return tuple(_spec(f, hints[f.name], name) for f in dataclasses.fields(section))


def _spec(f: dataclasses.Field[Any], hint: Any, section: str) -> FlagSpec:
    info: FlagInfo = f.metadata["flag"]
    inner, optional = unwrap_optional(hint)
    factory: Any = f.default_factory
    default: Any = f.default if factory is _MISSING else factory()
    flag_name = info.off or "--" + f.name.replace("_", "-")
    value_type: Any = inner
    form: Form = "value"
    if get_origin(inner) is Literal:
        if info.choices is None:
            info = dataclasses.replace(info, choices=tuple(str(c) for c in get_args(inner)))
        value_type = str
    elif get_origin(inner) is tuple:
        value_type, form = get_args(inner)[0], "append" if info.append else "list"
    elif get_origin(inner) is not None:
        value_type, form = dict, "json"
    elif inner is bool:
        form = "pair" if optional else ("off" if info.off else "on")
    if info.derived:
        form = "none"
    return FlagSpec(
        name=flag_name, dest=f.name, section=section, form=form, type=value_type, default=default, info=info
    )


def value_problem(spec: FlagSpec, value: Any) -> str | None:
    """Why ``value`` is not acceptable for ``spec``, or None."""
    if value is None or spec.form == "none":
        return None
    items: Sequence[Any] = value if spec.form in ("list", "append") else (value,)
    if spec.choices is not None:
        wrong = [item for item in items if item not in spec.choices]
        if wrong:
            return f"{spec.name} {wrong[0]}: accepted values are {', '.join(spec.choices)}"
    info = spec.info
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | float):
            continue
        if not math.isfinite(item):
            return f"{spec.name} must be a finite number{_bounds(info)}, found {item:g}"
        if info.at_least is not None and item < info.at_least:
            return f"{spec.name} must be at least {info.at_least:g}, found {item:g}"
        if info.above is not None and item <= info.above:
            return f"{spec.name} must be > {info.above:g}, found {item:g}"
        if info.at_most is not None and item > info.at_most:
            return f"{spec.name} must be at most {info.at_most:g}, found {item:g}"
    return None


def _bounds(info: FlagInfo) -> str:
    """What else a number must be."""
    limits = ((">=", info.at_least), (">", info.above), ("<=", info.at_most))
    text = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
    return text and f" {text}"


class Section:
    """Base of the configuration sections: one frozen dataclass per concern, checked when built.

    Raises:
        ConfigError: A value lies outside what its flag accepts (from ``__post_init__``).
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        specs = flag_specs(type(self), "")
        problems = [p for p in (value_problem(s, getattr(self, s.dest)) for s in specs) if p is not None]
        if problems:
            raise ConfigError(problems)
