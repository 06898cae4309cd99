from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.cluster.ports import EnginePorts, PortBook, free_port_runs
from slime.errors import EngineError


def test_runs_are_free_and_in_a_row():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port_runs(port, (1,))[0] > port
        first, second = free_port_runs(port - 2, (4, 2))
        assert first > port
        assert second >= first + 4


def test_there_may_be_none():
    with pytest.raises(EngineError, match="in a row from 65530"):
        free_port_runs(65530, (10,))


def test_engines_started_together_get_different_ports():
    book = PortBook(range(15000, 15001))
    widths = EnginePorts.widths(2)
    searched: list[int] = []

    def search(start: int) -> list[int]:
        searched.append(start)
        return [start + sum(widths[:i]) for i in range(len(widths))]

    sets: list[set[int]] = []
    for node in ("a", "a", "b"):
        ports = book.take(node, widths, search)
        sets.append({p + i for p, width in zip(ports, widths, strict=True) for i in range(width)})
    assert not sets[0] & sets[1]
    assert len(sets[0]) == sum(widths)
    assert searched == [15000, max(sets[0]) + 1, 15000]  # other nodes have ports of their own


def test_servers_that_start_at_the_same_time_get_different_ports():
    book = PortBook(range(15000, 15001))

    def search(start: int) -> list[int]:
        time.sleep(0.01)  # as long as it takes to ask the node
        return [start]

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: book.take("node", (1,), search)[0], range(8)))
    assert sorted(taken) == list(range(15000, 15008))
