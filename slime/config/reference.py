"""The reference page and ``--help``, both derived from the sections.

``python -m slime.config.reference > docs/flags.md`` writes the page; a test holds that it is current.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from slime.config.embedded_flags import EMBEDDED_USED, EMBEDDED_WITHOUT_EFFECT
from slime.config.engine_flags import SGLANG_FLAGS, SGLANG_OWNED
from slime.config.flags import FlagSpec, flag_specs, words
from slime.config.router_flags import ROUTER_FLAGS, ROUTER_OWNED, ROUTER_PRESETS
from slime.config.rules.availability import AVAILABLE_VALUES, accepted_text
from slime.config.schema import SECTIONS, all_flag_specs

_INTRO = """\
# Command-line flags

`python train.py FLAGS` and `python train_async.py FLAGS`. One command line holds three families:

- slime's own flags, listed here;
- Megatron's flags under Megatron's own names (`--tensor-model-parallel-size 2`); model flags that are not
  given are derived from the model's config.json;
- the engine's flags with the prefix `--sglang-` and the router's with `--router-`.

An unknown flag is an error that names the nearest known ones; abbreviations are not accepted. All problems of a
command line are reported together, before any process starts, and the exit code is 2. `--flag=value` is the same as
`--flag value`. `--dry-run` prints the plan of a run and stops.

This page is generated: `python -m slime.config.reference > docs/flags.md`.
"""


def section_title(name: str) -> str:
    """Heading of a section: the first line of its docstring."""
    doc = SECTIONS[name].__doc__ or name
    return doc.strip().splitlines()[0].rstrip(".")


def value_text(spec: FlagSpec) -> str:
    """How a flag's value is written, for example ``INT`` or ``{a,b}``."""
    if spec.form in ("on", "off", "pair"):
        return ""
    kinds = {int: "INT", float: "NUMBER", str: "TEXT", dict: "JSON"}
    text = spec.info.metavar or kinds.get(spec.type, "VALUE")
    if spec.choices is not None:
        text = "{" + ",".join(spec.choices) + "}"
    return f"{text} ..." if spec.form in ("list", "append") else text


def default_text(spec: FlagSpec) -> str:
    """The default as a user would write it; empty when there is none."""
    default: Any = spec.default
    if spec.form in ("on", "off", "pair") or default is None or default == () or default == {}:
        return ""
    return words(default)


def flag_lines() -> Mapping[str, list[FlagSpec]]:
    """Flags by section name, derived fields left out."""
    return {name: [s for s in flag_specs(section, name) if s.form != "none"] for name, section in SECTIONS.items()}


def help_text(program: str) -> str:
    """The text of ``--help``: every flag of ours by section, then where the other families are."""
    lines = [f"usage: python {program} FLAGS", ""]
    for name, specs in flag_lines().items():
        lines.append(f"{section_title(name)}:")
        for spec in specs:
            default = default_text(spec)
            description = spec.info.help + (f" [default: {default}]" if default else "") + _availability(spec)
            lines.append(f"  {' / '.join(spec.names)} {value_text(spec)}".rstrip())
            lines += textwrap.wrap(description, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    lines += [
        "Megatron's flags are written with Megatron's own names, for example --tensor-model-parallel-size 2.",
        f"Engine flags have the prefix --sglang- ({len(SGLANG_FLAGS)}, for example --sglang-mem-fraction-static 0.8).",
        f"Router flags have the prefix --router- ({len(ROUTER_FLAGS)}, for example --router-policy round_robin).",
        "docs/flags.md lists them all.",
    ]
    return "\n".join(lines) + "\n"


def reference_page() -> str:
    """The whole page in Markdown."""
    parts = [_INTRO]
    for name, specs in flag_lines().items():
        parts.append(f"## {section_title(name)}\n\n| Flag | Value | Default | Meaning |\n|---|---|---|---|")
        parts[-1] += "".join("\n" + _row(spec) for spec in specs) + "\n"
    parts.append(_prefixed("Engine flags", "--sglang-", SGLANG_FLAGS, SGLANG_OWNED))
    parts.append(
        f"The embedded engine uses {_names(EMBEDDED_USED)}.\n\nWithout effect on it, which is said once: "
        f"{_names(EMBEDDED_WITHOUT_EFFECT)}.\n\nAny other value than SGLang's default is refused for it.\n"
    )
    parts.append(_prefixed("Router flags", "--router-", ROUTER_FLAGS, ROUTER_OWNED))
    presets = ", ".join(f"`{_written('--router-', name, value)}`" for name, value in ROUTER_PRESETS.items())
    parts.append(f"Where nothing is given, slime sets for the router: {presets}.\n")
    return "\n".join(parts)


def _names(names: Collection[str]) -> str:
    return ", ".join(f"`{name.replace('_', '-')}`" for name in sorted(names))


def _written(prefix: str, name: str, value: Any) -> str:
    flag = prefix + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"


def _availability(spec: FlagSpec) -> str:
    if spec.dest not in AVAILABLE_VALUES:
        return ""
    accepted = [str(value) for value in AVAILABLE_VALUES[spec.dest] if value is not None]
    if len(accepted) > 1:
        return f" [available in this version: {', '.join(accepted)}]"
    return f" [not available in this version; {accepted_text(spec)}]"


def _row(spec: FlagSpec) -> str:
    names = " / ".join(f"`{name}`" for name in spec.names)
    default = default_text(spec)
    cells = (names, value_text(spec), f"`{default}`" if default else "", spec.info.help + _availability(spec))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _prefixed(title: str, prefix: str, table: Mapping[str, str], owned: Mapping[str, str]) -> str:
    ours = {name for spec in all_flag_specs() for name in spec.names}
    instead = {prefix + name.replace("_", "-"): hint for name, hint in sorted(owned.items())}
    rows = "\n".join(f"| `{name}` | {hint} |" for name, hint in instead.items() if name not in ours)
    return (
        f"## {title}\n\nWith the prefix `{prefix}` (a newer installed version may have more):\n\n{_names(table)}.\n\n"
        f"These cannot be given:\n\n| Flag | Instead |\n|---|---|\n{rows}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(reference_page())
