"""The Ray instance of a run, and the guarantee that none of it stays behind."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from slime.cluster.guardian import MARK_VARIABLE, Guardian, new_mark

_OBJECT_STORE_BYTES = 2 << 30
_SCRATCH_PARENT = "/tmp"  # Unix socket paths below it must stay under 108 characters


@contextmanager
def guarded_processes() -> Generator[Guardian]:
    """A guardian for this run's processes; nothing of the run is alive when the block is left."""
    mark = new_mark()
    scratch = Path(_SCRATCH_PARENT) / mark
    guardian: Guardian | None = None
    # Inherited by every process started from here on; this is how the guardian knows them.
    os.environ[MARK_VARIABLE] = mark
    try:
        scratch.mkdir(mode=0o700)
        guardian = Guardian(mark, scratch)
        yield guardian
    finally:
        os.environ.pop(MARK_VARIABLE, None)
        if guardian is not None:
            guardian.close()
        else:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def ray_session(device: str, num_slots: int, scratch_dir: Path) -> Generator[None]:
    """Connect to the cluster of ``RAY_ADDRESS``, or start one on this machine.

    Enter it inside ``signals.held_back``, so that the started daemons do not follow ending signals.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        num_slots: Processes that a cluster of our own has room for.
        scratch_dir: Where Ray of our own keeps sockets and logs.
    """
    common: dict[str, Any] = {"namespace": "slime", "log_to_driver": True, "logging_level": logging.WARNING}
    address = os.environ.get("RAY_ADDRESS")
    if address:
        settings: Mapping[str, Any] = {"address": address, **common}
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        settings = {
            **common,
            "include_dashboard": False,
            "num_cpus": max(num_slots, 1),
            "_temp_dir": str(scratch_dir),
            "object_store_memory": _object_store_bytes(),
        }
        if device == "cpu":
            settings["num_gpus"] = 0
    # Ray announces on every start that its (local) cluster has a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    try:
        ray.init(**settings)
        if not address:
            _end_daemons_without_asking()
        yield
    finally:
        ray.shutdown()


def _end_daemons_without_asking() -> None:
    """Let ``ray.shutdown`` kill its daemons at once.

    Ray sends them SIGTERM first and waits for seconds, but they hold that signal back.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    node = worker._global_node
    kill = node.kill_all_processes
    node.kill_all_processes = lambda *args, **options: kill(*args, **{**options, "allow_graceful": False})


def _object_store_bytes() -> int:
    """At most 2 GiB, and at most 40 % of the shared memory that is free."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else _OBJECT_STORE_BYTES
    return max(128 << 20, min(_OBJECT_STORE_BYTES, int(free * 0.4)))
