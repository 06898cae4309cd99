"""How a data file is named: accepted types, and a slice of its rows as ``path@[start:end]``."""

from __future__ import annotations

import re

DATA_SUFFIXES = (".jsonl", ".parquet")
"""Accepted file types."""

_SLICED = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]")


def parse_sliced_path(path: str) -> tuple[str, slice]:
    """Split ``path@[start:stop]`` into the path and the slice; without a suffix, everything."""
    match = _SLICED.fullmatch(path)
    if match is None:
        return path, slice(None)
    start, stop = match["start"], match["stop"]
    return match["path"], slice(None if start is None else int(start), None if stop is None else int(stop))
