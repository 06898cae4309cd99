"""Run one function in several processes that talk over gloo, with a bound on the whole.

The function is a module-level function of the test file; it gets its rank, the number of ranks and a port
at which rank 0 may serve a store. A rank that raises ends the others, and its traceback is the test's
failure. A rank that hangs is killed and its stack, with those of the others, is reported.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = ["tests.support.training", "slime.backends.megatron.worker"]
"""Imported by the server; must start no thread."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a function learns about its process."""

    rank: int
    world_size: int
    port: int


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call ``function(rank, *args, **kwargs)`` in ``world_size`` processes of their own.

    They are forked from a server that has imported torch and Megatron once and does nothing else, so a rank
    starts in a fraction of a second. The server ends with this process.

    Args:
        world_size: Number of processes.
        function: Takes a ``Rank`` first; its result must be picklable.
        *args: Passed on.
        timeout_seconds: Bound on everything, process start included.
        **kwargs: Passed on.

    Returns:
        The results by rank.

    Raises:
        RanksFailed: With the traceback of each rank that raised, or the stacks of those that hung.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    payload = pickle.dumps((function, args, kwargs))
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, readers = [], []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            stacks = str(Path(folder) / f"{rank}.stacks")
            process = context.Process(
                target=_rank_main, args=(payload, Rank(rank, world_size, port), writer, stacks), daemon=False
            )
            process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        try:
            return _collect(readers, timeout_seconds)
        except _HungRanks as hung:
            raise RanksFailed(_describe_hang(hung, processes, Path(folder), timeout_seconds)) from None
        finally:
            _end(processes)


def free_port() -> int:
    """A free TCP port below those that the system gives to connections, which could take it before it is used."""
    for port in random.Random().sample(range(12_000, 32_000), 200):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("200 random ports between 12000 and 32000 are all taken")


class _HungRanks(Exception):
    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def _collect(readers: Sequence[Connection], timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = dict(enumerate(readers))
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if failures:
                break
            raise _HungRanks(list(pending))
        for rank, reader in list(pending.items()):
            if reader not in ready:
                continue
            del pending[rank]
            try:
                ok, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                ok, value = False, "the process died without a word"
            if ok:
                results[rank] = value
            else:
                failures[rank] = value
                # The others may now wait for this one; give them a moment to fail by themselves.
                deadline = min(deadline, time.monotonic() + 3.0)
    if failures:
        raise RanksFailed("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(readers))]


def _describe_hang(hung: _HungRanks, processes: Sequence[Any], folder: Path, timeout_seconds: float) -> str:
    for rank in hung.ranks:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)  # faulthandler writes the stacks
    time.sleep(1.0)
    texts = [f"ranks {list(hung.ranks)} did not finish within {timeout_seconds} s"]
    for rank in hung.ranks:
        stacks = folder / f"{rank}.stacks"
        texts.append(f"rank {rank}:\n{stacks.read_text() if stacks.exists() else '(no stacks)'}")
    return "\n".join(texts)


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.join(timeout=5.0 if process.exitcode is None else 0)
        if process.is_alive():
            process.kill()
            process.join(timeout=5.0)


def _rank_main(payload: bytes, rank: Rank, writer: Connection, stacks: str) -> None:
    import faulthandler

    import torch

    torch.set_num_threads(1)
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            function, args, kwargs = pickle.loads(payload)
            message = (True, function(rank, *args, **kwargs))
        except BaseException:  # noqa: BLE001  # the boundary of the process: whatever it is, it is reported
            message = (False, traceback.format_exc())
        writer.send_bytes(pickle.dumps(message))
        writer.close()
        faulthandler.unregister(signal.SIGUSR1)
        # Megatron's and gloo's threads may hold the interpreter; nothing of value is left to do.
        os._exit(0)
