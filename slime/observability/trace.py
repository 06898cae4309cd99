"""Traces of samples: what happened to one when, kept on the sample and written with its dump.

Owns the carrier ``sample.trace`` and the events in it. Tracing never breaks a rollout: its own
faults are logged once and ignored; faults of the traced code are recorded and raised. Tests hold:
spans nest by context across tasks, and a carrier survives ``to_dict`` / ``from_dict``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from slime.types import Sample

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

VERSION = 1
_parents: ContextVar[tuple[str, ...]] = ContextVar("slime_trace_parents", default=())


@dataclass(frozen=True, slots=True)
class TraceHandle:
    """A sample's carrier: ``{version, trace_id, attempt, events}`` and the ids that events repeat."""

    carrier: dict[str, Any]
    sample_id: int | None = None
    group_id: int | None = None


TraceTarget = Sample | TraceHandle | Sequence[Sample | TraceHandle]


class Span:
    """Attributes of a running span; they are written when it ends."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        """Set one attribute."""
        self.attributes[key] = value

    def update(self, values: Mapping[str, Any]) -> None:
        """Set several attributes."""
        self.attributes.update(values)


def bind_trace(sample: Sample) -> TraceHandle:
    """The handle of a sample; its carrier is created on first use."""
    carrier: Any = vars(sample).get("trace")
    if not isinstance(carrier, dict):
        carrier = {"version": VERSION, "trace_id": uuid.uuid4().hex, "attempt": 0, "events": []}
        vars(sample)["trace"] = carrier
    return TraceHandle(cast("dict[str, Any]", carrier), sample.index, sample.group_index)


@contextmanager
def trace_span(target: TraceTarget, name: str, attrs: Mapping[str, Any] | None = None) -> Generator[Span]:
    """Record the block as a span of every sample in ``target``.

    Args:
        target: Sample, handle, or a list of them.
        name: Name of the span.
        attrs: Attributes known at the start; further ones are set on the yielded span.
    """
    handles, span, span_id = _handles(target), Span(), uuid.uuid4().hex[:16]
    token = _parents.set((*_parents.get(), span_id))
    _emit(handles, "span_start", name, span_id, _parents.get()[:-1], dict(attrs or {}))
    try:
        yield span
    except BaseException as error:
        span.set("error", f"{type(error).__name__}: {error}")
        raise
    finally:
        _emit(handles, "span_end", name, span_id, _parents.get()[:-1], span.attributes)
        _parents.reset(token)


def trace_event(target: TraceTarget, name: str, attrs: Mapping[str, Any] | None = None) -> None:
    """Record an instant."""
    _emit(_handles(target), "event", name, uuid.uuid4().hex[:16], _parents.get(), dict(attrs or {}))


def trace_function(
    name: str, target: str = "sample", attrs_getter: Callable[..., Mapping[str, Any]] | None = None
) -> Callable[[F], F]:
    """Make every call of a function, sync or async, a span.

    Args:
        name: Name of the span.
        target: Parameter that holds the sample, handle or list.
        attrs_getter: Called with the arguments of the call; its result becomes attributes.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bound = signature.bind(*args, **kwargs)
            attributes = attrs_getter(*args, **kwargs) if attrs_getter else None
            return trace_span(bound.arguments[target], name, attributes)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_async(*args: Any, **kwargs: Any) -> Any:
                with opened(args, kwargs):
                    return await function(*args, **kwargs)

            return cast("F", traced_async)

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with opened(args, kwargs):
                return function(*args, **kwargs)

        return cast("F", traced)

    return decorate


def trace_next_attempt(sample: Sample) -> None:
    """Count a retry after an abort; later events carry the new number."""
    bind_trace(sample).carrier["attempt"] += 1


def export_trace(handle: TraceHandle) -> dict[str, Any]:
    """What another process needs to continue the trace."""
    return {
        "carrier": {**handle.carrier, "events": list(handle.carrier["events"])},
        "sample_id": handle.sample_id,
        "group_id": handle.group_id,
    }


def import_trace(payload: Mapping[str, Any], carrier: dict[str, Any] | None = None) -> TraceHandle:
    """A handle from ``export_trace``; with ``carrier`` the payload's new events are merged into it."""
    if carrier is None:
        return TraceHandle(dict(payload["carrier"]), payload["sample_id"], payload["group_id"])
    known = {(event["span_id"], event["kind"]) for event in carrier["events"]}
    carrier["events"].extend(e for e in payload["carrier"]["events"] if (e["span_id"], e["kind"]) not in known)
    return TraceHandle(carrier, payload["sample_id"], payload["group_id"])


def _handles(target: TraceTarget) -> list[TraceHandle]:
    if isinstance(target, Sample):
        return [bind_trace(target)]
    if isinstance(target, TraceHandle):
        return [target]
    try:
        return [handle for item in target for handle in _handles(item)]
    except TypeError:
        logger.warning("cannot trace %s; expected a sample, a handle or a list of them", type(target).__name__)
        return []


def _emit(
    handles: list[TraceHandle], kind: str, name: str, span_id: str, parents: tuple[str, ...], attrs: dict[str, Any]
) -> None:
    timestamp = time.time()
    for handle in handles:
        handle.carrier["events"].append(
            {
                "kind": kind,
                "name": name,
                "span_id": span_id,
                "parent_id": parents[-1] if parents else None,
                "timestamp": timestamp,
                "sample_id": handle.sample_id,
                "group_id": handle.group_id,
                "attempt": handle.carrier["attempt"],
                "attrs": dict(attrs),
            }
        )
