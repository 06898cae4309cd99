"""What an engine can do, read from what it says about itself.

SGLang changed behaviour on which weight updates depend, between 0.5.15 and 0.5.23: this module is the one place that
knows its versions. Others ask for a property. Tests hold: an engine of unknown version is trusted with nothing that
would give wrong results if it were not so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from slime.engines import api
from slime.errors import EngineError
from slime.http_control import HttpStatusError, request

_NOT_FOUND = 404
_OLD_SERVER_INFO = "/get_server_info"

_SPANS_SINCE = (0, 5, 19)
_BRACKET_SINCE = (0, 5, 21)
_FLUSHES_PAST_WAITING_SINCE = (0, 5, 21)
_SURVIVES_REFUSED_FLUSH_SINCE = (0, 5, 22)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFeatures:
    """Properties of one engine.

    Attributes:
        backend: Which engine it is.
        version: As it states it; empty if it does not.
        update_bracket: Whether updates from tensors and from a group must lie between ``/begin_weight_update`` and
            ``/end_weight_update``. None: only the answer to a first call tells, 404 meaning no.
        flushes_past_waiting: Whether a paused engine empties its cache although retracted requests wait.
        survives_refused_flush: Whether a flush that an update asks for and that is refused leaves it alive.
        has_version_spans: Whether a reply says which weights made which token (``weight_versions``).
        keeps_routes: Whether the experts of tokens that are computed again stay those of the first time.
        names_parts: Whether checksums are named as in a Hugging Face checkpoint; else as the engine fuses them.
        dtype: What it holds its weights in, as it states it; None if that is left to the checkpoint.
        tp_size: Processes that share every layer.
        pp_size: Pipeline stages.
        dp_size: Copies of the attention.
        is_disaggregated: Whether it computes prompts for others, or continues prompts of others. SGLang then keeps a
            prompt that is half computed when it takes requests back.
    """

    backend: Literal["embedded", "sglang"]
    version: str
    update_bracket: bool | None
    flushes_past_waiting: bool
    survives_refused_flush: bool
    has_version_spans: bool
    keeps_routes: bool
    names_parts: bool
    dtype: str | None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    is_disaggregated: bool = False


def ask_features(url: str, *, timeout_seconds: float, waiter: str = "the driver") -> EngineFeatures:
    """Ask an engine what it is.

    Args:
        url: Its base address.
        timeout_seconds: Limit on each of at most two requests.
        waiter: Who waits, for messages.

    Raises:
        EngineError: It cannot be reached, or what answers is no engine.
        WaitTimeoutError: No answer in time.
    """
    return features_of(ask_server_info(url, timeout_seconds=timeout_seconds, waiter=waiter))


def ask_server_info(url: str, *, timeout_seconds: float, waiter: str = "the driver") -> dict[str, Any]:
    """What an engine says of itself, whichever name its version has for that; arguments and errors as above."""
    try:
        info = request(url + api.SERVER_INFO, timeout_seconds=timeout_seconds, waiter=waiter)
    except HttpStatusError as error:
        if error.status != _NOT_FOUND:
            raise
        info = request(url + _OLD_SERVER_INFO, timeout_seconds=timeout_seconds, waiter=waiter)
    if not isinstance(info, dict):
        raise EngineError(f"{url}{api.SERVER_INFO} answered {info!r:.200}; an engine answers with a JSON object")
    return cast("dict[str, Any]", info)


def features_of(info: Mapping[str, Any]) -> EngineFeatures:
    """Properties of the engine that answered ``/server_info`` with ``info``."""
    is_ours = info.get("engine") == "embedded"
    version = str(info.get("version") or "")
    release = _Release.read(version)

    def since(first: tuple[int, int, int]) -> bool:
        return is_ours or (release is not None and release.has(first))

    dtype = info.get("dtype")
    return EngineFeatures(
        backend="embedded" if is_ours else "sglang",
        version=version,
        update_bracket=since(_BRACKET_SINCE) if is_ours or (release and not release.is_unfinished) else None,
        flushes_past_waiting=since(_FLUSHES_PAST_WAITING_SINCE),
        survives_refused_flush=since(_SURVIVES_REFUSED_FLUSH_SINCE),
        has_version_spans=since(_SPANS_SINCE),
        keeps_routes=is_ours,
        names_parts=is_ours,
        dtype=None if dtype in (None, "auto") else str(dtype).removeprefix("torch."),
        tp_size=int(info.get("tp_size") or 1),
        pp_size=int(info.get("pp_size") or 1),
        dp_size=int(info.get("dp_size") or 1),
        is_disaggregated=info.get("disaggregation_mode") not in (None, "null"),
    )


@dataclass(frozen=True, slots=True)
class _Release:
    """A version of SGLang; ``is_unfinished`` for a build made on the way to it."""

    number: tuple[int, int, int]
    is_unfinished: bool

    @classmethod
    def read(cls, version: str) -> _Release | None:
        """None where the text names no release, as in builds from a checkout without tags (``0.0.0.dev1``)."""
        found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
        if found is None:
            return None
        major, minor, patch = (int(part) for part in found.groups())
        if (major, minor, patch) == (0, 0, 0):
            return None
        rest = version[found.end() :].partition("+")[0]
        return cls((major, minor, patch), re.match(r"[.\-_]?(dev|rc|a|b)\d*", rest) is not None)

    def has(self, first: tuple[int, int, int]) -> bool:
        """Whether it surely contains what release ``first`` brought."""
        return self.number > first or (self.number == first and not self.is_unfinished)
