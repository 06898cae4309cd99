"""Process groups between a trainer and engines, besides each side's own default group.

``torch.distributed`` creates further groups only among the ranks of the default one; a trainer and an engine have
different default groups, so the helper below makes one from a rendezvous of its own.
"""

from __future__ import annotations

import random
import socket
from datetime import timedelta
from typing import Any, cast

import torch.distributed
from torch.distributed import ProcessGroup, distributed_c10d

from slime.errors import EngineError, WaitTimeoutError

dist = cast(Any, torch.distributed)
_internals = cast(Any, distributed_c10d)


_RENDEZVOUS_PORTS = range(20000, 30000)  # below those that the system gives to connections
_PORT_TRIES = 100


def rendezvous_port() -> int:
    """A port that is free on this host now.

    Raises:
        EngineError: None of many was.
    """
    for port in random.sample(_RENDEZVOUS_PORTS, _PORT_TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise EngineError(f"none of {_PORT_TRIES} ports from {_RENDEZVOUS_PORTS.start} on is free")


def join_group(
    *,
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_seconds: float,
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

    Raises:
        WaitTimeoutError: Not all members came in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        url = f"tcp://{master_address}:{master_port}"
        store, rank, world_size = next(dist.rendezvous(url, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
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
            f"rank {rank} waited {timeout_seconds:.0f} s for {world_size} members of group {name} "
            f"at {master_address}:{master_port}: {error}"
        ) from error
    _internals._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave_group(group: ProcessGroup) -> None:
    """Free a group made by ``join_group``."""
    dist.destroy_process_group(group)
