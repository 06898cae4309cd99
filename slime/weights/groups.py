"""Process groups between a trainer and engines, besides each side's own default group.

``torch.distributed`` creates further groups only among the ranks of the default one; a trainer and an engine have
different default groups, so the helper below makes one from a rendezvous of its own.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any, cast

import torch.distributed
from torch.distributed import ProcessGroup, distributed_c10d

from slime.errors import EngineError, WaitTimeoutError

dist = cast(Any, torch.distributed)
_internals = cast(Any, distributed_c10d)

_RENDEZVOUS_PORTS = range(20000, 30000)  # below those that the system gives to connections
_PORT_TRIES = 100
_IN_USE = "EADDRINUSE"


class Rendezvous:
    """A place where the members of a group meet, listened at and entered from the start; it must outlive the group.

    Args:
        address: Of this host, at which the members reach it.
        timeout_seconds: For each of this member's questions.

    Raises:
        EngineError: It cannot be opened.
    """

    def __init__(self, address: str, *, timeout_seconds: float) -> None:
        self.address = address
        timeout = timedelta(seconds=timeout_seconds)
        for port in random.sample(_RENDEZVOUS_PORTS, _PORT_TRIES):
            try:
                self._listener = _store(address, port, listens=True, timeout=timeout)
                self.entry = _store(address, port, listens=False, timeout=timeout)
            except dist.DistError as error:
                if _IN_USE in str(error):
                    continue
                raise EngineError(f"no group of the weights can meet at {address}:{port}: {error}") from error
            self.port = port
            return
        raise EngineError(f"none of {_PORT_TRIES} ports from {_RENDEZVOUS_PORTS.start} on is free")

    def close(self) -> None:
        """Stop to listen: who still waits for other members fails at once."""
        self._listener = None


def join_group(
    *,
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_seconds: float,
    entry: Any = None,
) -> ProcessGroup:
    """Join a named group; returns when all ``world_size`` members have.

    Args:
        master_address: Where rank 0 listens.
        master_port: Its port.
        rank: Own rank; the trainer is rank 0.
        world_size: Members in all.
        name: Same on every member.
        backend: ``gloo`` or ``nccl``.
        timeout_seconds: For the rendezvous and for every later operation.
        entry: Of an open ``Rendezvous`` there; without one rank 0 listens from now on.

    Raises:
        WaitTimeoutError: Not all members came in time.
        EngineError: The connection to the rendezvous or to a member failed.
    """
    timeout = timedelta(seconds=timeout_seconds)
    place = f"{master_address}:{master_port}"
    try:
        store = entry or _store(master_address, master_port, listens=rank == 0, timeout=timeout)
        # The public functions insist on the default group; this private one is what they call. Its keyword
        # for the options changed its name in torch 2.6.
        group, _ = _internals._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=timeout,
        )
    except dist.DistStoreError as error:
        raise WaitTimeoutError(
            f"rank {rank} waited {timeout_seconds:.0f} s for {world_size} members of group {name} at {place}: {error}"
        ) from error
    except RuntimeError as error:  # of the network, or of the backend
        raise EngineError(f"rank {rank} cannot join group {name} at {place}: {error}") from error
    _internals._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _store(address: str, port: int, *, listens: bool, timeout: timedelta) -> Any:
    return dist.TCPStore(address, port, is_master=listens, timeout=timeout, wait_for_workers=False)


def leave_group(group: ProcessGroup) -> None:
    """Free a group made by ``join_group``."""
    dist.destroy_process_group(group)
