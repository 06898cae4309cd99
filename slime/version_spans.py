"""Which weights generated which tokens: spans of a response, each with one weight version.

Engines report spans over the output of one request; a sample holds them over its response, where tokens that no engine
generated (a tool's answer) belong to no span. Versions are names; those that are numbers count the synchronisations.

Pure functions. Tests hold: spans are in order, inside the response and never overlap, whatever was appended in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` (exclusive) come from weights ``version``."""

    version: str
    start: int
    end: int


def spans_of_reply(meta_info: Mapping[str, Any], count: int) -> list[VersionSpan]:
    """Spans of the first ``count`` output tokens of one request; none if the reply names no version.

    Args:
        meta_info: The engine's reply: ``weight_versions``, or from engines without it ``weight_version``, which was
            then that of all tokens.
        count: Tokens of the output; fewer than the engine generated where a caller keeps only the beginning.
    """
    rows: Any = meta_info.get("weight_versions")
    if not rows:
        version = meta_info.get("weight_version")
        rows = [] if version is None else [{"version": version, "start": 0, "end": count}]
    return clip_spans((VersionSpan(str(r["version"]), int(r["start"]), int(r["end"])) for r in rows), count)


def clip_spans(spans: Iterable[VersionSpan], length: int) -> list[VersionSpan]:
    """What of ``spans`` lies within the first ``length`` tokens."""
    clipped = [replace(span, end=min(span.end, length)) for span in spans]
    return [span for span in clipped if span.end > span.start]


def append_spans(spans: Sequence[VersionSpan], new: Iterable[VersionSpan], offset: int) -> list[VersionSpan]:
    """``spans`` and, ``offset`` tokens further on, ``new``; neighbours of one version become one."""
    joined = list(spans)
    for span in new:
        start, end = span.start + offset, span.end + offset
        if joined and joined[-1].version == span.version and joined[-1].end == start:
            start = joined.pop().start
        joined.append(VersionSpan(span.version, start, end))
    return joined


def check_spans(spans: Sequence[VersionSpan], length: int) -> None:
    """Raise ValueError unless spans rise within a response of ``length`` tokens."""
    end = 0
    for span in spans:
        if span.start < end or span.end <= span.start or span.end > length:
            raise ValueError(f"weight version spans must rise within the response of {length} tokens; found {span}")
        end = span.end


def version_number(version: str) -> int:
    """The version as a number; a name that is none is the engine's own for weights that it loaded itself: 0."""
    return int(version) if version.isdigit() else 0
