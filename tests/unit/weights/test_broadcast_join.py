"""Engines that do not come into the group of the weights are named at once, and those that came are let go."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from slime.errors import EngineError, WeightSyncError
from slime.weights import groups
from slime.weights.broadcast import BroadcastChannel
from slime.weights.control import Deadline
from slime.weights.groups import Rendezvous, join_group
from tests.support.fake_control import ControlRecorder
from tests.support.weight_updates import endpoints_of

INIT = "/init_weights_update_group"


def refuses(path: str, body: Any) -> int:
    return 400 if path == INIT else 200


def dies(path: str, body: Any) -> int:
    if path == INIT:
        raise ConnectionAbortedError
    return 200


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (refuses, WeightSyncError, r"^engine 1 cannot join the group of the weights: .* answered 400"),
        (dies, EngineError, r"^engine 1: .*cannot be reached"),
    ],
)
def test_an_engine_that_does_not_join_is_named_at_once(
    answer: Callable[[str, Any], int], error: type[Exception], message: str
) -> None:
    freed = threading.Event()

    def waits_for_the_others(path: str, body: Any) -> int:
        if path == INIT:
            limit = timedelta(seconds=30)
            store = dist.TCPStore(
                body["master_address"], body["master_port"], is_master=False, wait_for_workers=False, timeout=limit
            )
            try:
                store.wait(["of engine 1"], limit)
            except RuntimeError:
                freed.set()
                return 400
        return 200

    with ControlRecorder(waits_for_the_others) as a, ControlRecorder(answer) as b:
        started = time.monotonic()
        with pytest.raises(error, match=message):
            BroadcastChannel(endpoints_of([a.url, b.url]), [1, 1], deadline=Deadline(60.0), backend="gloo")
        assert freed.wait(5)
        assert time.monotonic() - started < 10


def test_a_port_that_is_taken_is_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken, socket.socket() as free:
        for probe in (taken, free):
            probe.bind(("", 0))
        taken.listen()
        ports = [taken.getsockname()[1], free.getsockname()[1]]
        free.close()
        monkeypatch.setattr(groups.random, "sample", lambda population, k: ports)
        meeting = Rendezvous("127.0.0.1", timeout_seconds=5.0)
        assert meeting.port == ports[1]
        monkeypatch.setattr(groups.random, "sample", lambda population, k: ports[:1])
        with pytest.raises(EngineError, match="none of 100 ports from 20000 on is free"):
            Rendezvous("127.0.0.1", timeout_seconds=5.0)
        meeting.close()


def test_what_the_network_says_is_an_engine_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(EngineError, match=rf"rank 1 cannot join group g at 127\.0\.0\.1:{port}"):
        join_group(
            master_address="127.0.0.1",
            master_port=port,
            rank=1,
            world_size=2,
            name="g",
            backend="gloo",
            timeout_seconds=1.0,
        )
