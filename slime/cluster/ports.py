"""Ports of the servers that a run starts.

A port is only tried, not held, until the server binds it. So two servers of one run never get the same: the next
search on a node begins behind the last port given out there. What other programs take in between is tried again.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime.errors import EngineError

# The first port tried is random in a range, so that runs which start at the same moment rarely meet. The ranges end
# below the ports that the system gives to connections.
ENGINE_PORTS = range(15000, 19000)
ROUTER_PORTS = range(3000, 4000)
PROMETHEUS_PORTS = range(4000, 5000)
_ATTEMPTS = 2000
_END = 65536

# SGLang derives the ports of data-parallel attention from the one of dist_init_addr: six, and one per replica.
_DERIVED_PORTS = 8


class PortBook:
    """Which port is tried next on each node."""

    def __init__(self, candidates: range = ENGINE_PORTS) -> None:
        """Start anywhere in ``candidates``."""
        self._candidates = candidates
        self._next: dict[str, int] = {}
        self._lock = threading.Lock()  # engines that are replaced start in threads of their own

    def take(self, node_id: str, widths: Sequence[int], search: Callable[[int], list[int]]) -> list[int]:
        """Ports for one server.

        Args:
            node_id: Where.
            widths: How many consecutive ports are needed after each, itself included.
            search: Finds free ones on that node from a first candidate on.
        """
        with self._lock:
            start = self._next.get(node_id) or random.choice(self._candidates)
            found = search(start)
            self._next[node_id] = found[-1] + widths[-1]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePorts:
    """Ports of one engine process.

    Args:
        server: HTTP.
        nccl: Of its process group, on one node.
        dist_init: First of those at which the processes of an engine meet.
        bootstrap: Where decode engines meet a prefill engine.
    """

    server: int
    nccl: int
    dist_init: int
    bootstrap: int

    @staticmethod
    def widths(dp_size: int) -> tuple[int, int, int, int]:
        """Consecutive ports that each needs, in the order of the fields."""
        return (1, 1, _DERIVED_PORTS + dp_size, 1)

    @classmethod
    def of(cls, ports: Sequence[int]) -> EnginePorts:
        """From what ``PortBook.take`` found."""
        server, nccl, dist_init, bootstrap = ports
        return cls(server=server, nccl=nccl, dist_init=dist_init, bootstrap=bootstrap)


def free_port(start: int) -> int:
    """A TCP port nobody listens on, the first from ``start`` on.

    Raises:
        EngineError: No port was free.
    """
    return free_port_runs(start, (1,))[0]


def free_port_runs(start: int, widths: Sequence[int]) -> list[int]:
    """First ports of runs of consecutive ports that nobody listens on, one after the other.

    Args:
        start: First candidate.
        widths: Length of each run.

    Raises:
        EngineError: There are none.
    """
    found: list[int] = []
    candidate = start
    for width in widths:
        while candidate + width > _END or not all(_is_free(port) for port in range(candidate, candidate + width)):
            candidate += 1
            if candidate > min(start + _ATTEMPTS, _END - width):
                raise EngineError(f"no {width} free TCP ports in a row from {start} to {candidate + width - 1}")
        found.append(candidate)
        candidate += width
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
