"""Parallel layouts by name: ``tp2_sp_pp2_dp2`` is written once, and read by tests and by the table they print.

A name is its parts joined by underscores: ``tp``, ``pp``, ``vpp``, ``cp``, ``dp``, ``ep``, ``etp`` with a size, ``sp``
for sequence parallelism, ``overlap`` for gradient reduction and parameter gathering that overlap with computation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
}
_SWITCHES = {"sp": ("--sequence-parallel",), "overlap": ("--overlap-grad-reduce", "--overlap-param-gather")}


@dataclass(frozen=True)
class Layout:
    """Megatron's flags of a layout and the processes it takes."""

    name: str
    argv: tuple[str, ...]
    world_size: int


def layout(name: str) -> Layout:
    """The layout of a name; ``one`` is a single process."""
    argv: list[str] = []
    sizes = dict.fromkeys(("tp", "pp", "cp", "dp", "ep"), 1)
    for part in [] if name == "one" else name.split("_"):
        if part in _SWITCHES:
            argv += _SWITCHES[part]
            continue
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        assert match, f"{part!r} in layout {name!r} is not known"
        kind, size = match[1], match[2]
        sizes[kind] = int(size)
        if kind != "dp":
            argv += (_FLAGS[kind], size)
    dense = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]
    # Experts are spread over ranks that hold the rest of the model several times.
    experts = sizes["ep"] * sizes.get("etp", sizes["tp"]) * sizes["pp"]
    return Layout(name=name, argv=tuple(argv), world_size=max(dense, experts))
