"""Bounded waits on Ray, with errors that name the process and the cause.

Owns the translation of Ray's errors: a failed actor call raises its own cause, a dead actor raises
what its owner made of it, an expired wait says who waits for what. Nothing here prints Ray's
nested tracebacks; the full one is in the log of the process that failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.errors import SlimeError, TrainerError
from slime.observability.watchdog import expired

POLL_SECONDS = 1.0
_DEATH_SECONDS = 2.0
STACK_SIGNAL = signal.SIGUSR1


def get(
    ref: Any,
    *,
    waited_for: str,
    timeout_seconds: float,
    check: Callable[[], None] | None = None,
    on_death: Callable[[int], SlimeError] | None = None,
) -> Any:
    """The value of one reference; see ``get_all``."""
    return get_all([ref], waited_for=[waited_for], timeout_seconds=timeout_seconds, check=check, on_death=on_death)[0]


def get_all(
    refs: Sequence[Any],
    *,
    waited_for: Sequence[str],
    timeout_seconds: float,
    check: Callable[[], None] | None = None,
    on_death: Callable[[int], SlimeError] | None = None,
    on_timeout: Callable[[list[int]], str] | None = None,
) -> list[Any]:
    """The values of several references; the first failure ends the wait at once.

    Args:
        refs: References.
        waited_for: What each stands for, for messages.
        timeout_seconds: Limit on all of them together.
        check: Called about once a second; raises when waiting further is pointless.
        on_death: Makes the error for a dead actor from the position of its reference.
        on_timeout: Makes further lines for an expired wait from the positions not yet done.

    Raises:
        WaitTimeoutError: The limit passed.
        SlimeError: What the call raised, or what ``on_death`` made, or a ``TrainerError`` that
            wraps any other exception of the call.
    """
    deadline = time.monotonic() + timeout_seconds
    values: dict[int, Any] = {}
    positions = {ref: i for i, ref in enumerate(refs)}
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=min(POLL_SECONDS, max(deadline - time.monotonic(), 0)))
        for ref in done:
            i = positions[ref]
            try:
                values[i] = _value(ref, i, waited_for[i], on_death)
            except SlimeError as error:
                raise _death_among(pending, positions, on_death) or error from None
        if done:
            continue
        if check is not None:
            check()
        if pending and time.monotonic() >= deadline:
            open_positions = [positions[ref] for ref in pending]
            raise expired(
                waiter="the driver",
                waited_for=", ".join(waited_for[i] for i in open_positions),
                timeout_seconds=timeout_seconds,
                details=on_timeout(open_positions) if on_timeout else "",
            )
    return [values[i] for i in range(len(refs))]


def _death_among(
    pending: Sequence[Any], positions: Mapping[Any, int], on_death: Callable[[int], SlimeError] | None
) -> SlimeError | None:
    """The error of a call whose process died: what those report that were talking to it is only the consequence."""
    if on_death is None or not pending:
        return None
    done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_DEATH_SECONDS)
    for ref in done:
        try:
            ray.get(ref)
        except RayActorError:
            return on_death(positions[ref])
        except RayError:
            continue
    return None


def _value(ref: Any, position: int, waited_for: str, on_death: Callable[[int], SlimeError] | None) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, SlimeError):
            # A fresh, traceback-free copy of the original; Ray's wrapper would print three nested ones.
            raise cause.with_traceback(None) from None
        raise TrainerError(f"{waited_for} failed: {type(cause).__name__}: {cause}") from None
    except RayActorError as error:
        if on_death is not None:
            raise on_death(position) from None
        raise TrainerError(f"{waited_for}: the process died: {_first_line(error)}") from None
    except RayError as error:
        raise TrainerError(f"{waited_for} failed in Ray: {type(error).__name__}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def on_this_node() -> dict[str, Any]:
    """Ray actor options for a helper process beside the driver, where its files and logs are."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the cluster: a process id means nothing without its node."""

    node_id: str
    pid: int


def request_stacks(processes: Sequence[Process]) -> list[Process]:
    """Ask processes to write their stacks into their logs (see ``actor.enter``).

    Returns:
        Those that were asked: the ones of this node.
    """
    here = ray.get_runtime_context().get_node_id()
    asked: list[Process] = []
    for process in processes:
        if process.node_id != here:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, STACK_SIGNAL)
            asked.append(process)
    return asked


def is_stopped(process: Process) -> bool:
    """Whether a process of this node was stopped by a signal, so that it neither works nor answers."""
    if process.node_id != ray.get_runtime_context().get_node_id():
        return False
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
