"""What surrounds a weight update, on engines that record what they are asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from slime.engines import api
from slime.errors import EngineError, WaitTimeoutError, WeightSyncError
from slime.http_control import HttpStatusError
from slime.weights.bracket import UpdateBracket, release
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint
from tests.support.fake_control import ControlRecorder

ORDER = ["/pause_generation", "/flush_cache", "/begin_weight_update", "/end_weight_update", "/continue_generation"]


@pytest.fixture
def engines() -> Iterator[list[ControlRecorder]]:
    with ControlRecorder() as a, ControlRecorder() as b:
        yield [a, b]


def bracket_of(engines: list[ControlRecorder], *, timeout_seconds: float = 10.0, **options: Any) -> UpdateBracket:
    endpoints = [EngineEndpoint(url=e.url, name=f"engine {i}", backend="sglang") for i, e in enumerate(engines)]
    return UpdateBracket(EngineCalls(endpoints, Deadline(timeout_seconds)), **options)


def test_the_order_of_an_update(engines: list[ControlRecorder]) -> None:
    checked: list[tuple[str, list[str]]] = []

    def check(version: str, *, send_seconds: float) -> None:
        checked.append((version, list(engines[0].asked)))

    bracket = bracket_of(engines, pause_mode="abort")
    with bracket.opened("7", check):
        assert [engine.asked for engine in engines] == [ORDER[:3]] * 2
    assert [engine.asked for engine in engines] == [ORDER] * 2
    assert checked == [("7", ORDER[:4])]
    assert engines[1].bodies["/pause_generation"] == {"mode": "abort"}
    assert bracket.times is not None
    assert bracket.times.total > 0


def test_what_in_place_and_files_leave_out(engines: list[ControlRecorder]) -> None:
    with bracket_of(engines, pause_mode="in_place").opened("1"):
        pass
    assert engines[0].asked == [ORDER[0], *ORDER[2:]]
    engines[0].asked.clear()
    with bracket_of(engines, has_session=False).opened("1"):
        pass
    assert engines[0].asked == [*ORDER[:2], ORDER[4]]


def test_an_engine_without_sessions_needs_none(engines: list[ControlRecorder]) -> None:
    engines[0].answer = lambda path, body: 404 if "weight_update" in path else 200
    with bracket_of(engines).opened("1"):
        pass
    assert engines[0].asked == [*ORDER[:3], ORDER[4]]
    assert engines[1].asked == ORDER


def test_an_update_that_was_never_closed_is_closed_first(engines: list[ControlRecorder]) -> None:
    begin = "/begin_weight_update"
    engines[1].answer = lambda path, body: 400 if path == begin and engines[1].asked.count(path) == 1 else 200
    with bracket_of(engines).opened("1"):
        pass
    assert engines[1].asked == [*ORDER[:3], ORDER[3], begin, *ORDER[3:]]


def test_a_pending_request_is_waited_for(engines: list[ControlRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("slime.weights.bracket.time.sleep", waits.append)
    engines[1].answer = lambda path, body: 400 if path == "/flush_cache" and engines[1].asked.count(path) < 5 else 200
    with bracket_of(engines).opened("1"):
        pass
    assert engines[1].asked == [ORDER[0], *["/flush_cache"] * 5, *ORDER[2:]]
    assert waits == [0.05, 0.1, 0.2, 0.4]


def test_a_request_that_never_ends_is_an_error(engines: list[ControlRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.weights.bracket.time.sleep", lambda seconds: None)
    engines[1].answer = lambda path, body: 400 if path == "/flush_cache" else 200
    with (
        pytest.raises(WeightSyncError, match="the cache of engine 1 could not be flushed"),
        bracket_of(engines).opened("1"),
    ):
        raise AssertionError("the body must not run")
    assert engines[1].asked.count("/flush_cache") == 60
    assert [engine.asked[-1] for engine in engines] == ["/end_weight_update"] * 2


@pytest.mark.parametrize("route", ORDER)
def test_after_any_refusal_every_engine_is_closed_and_none_goes_on(engines: list[ControlRecorder], route: str) -> None:
    engines[0].answer = lambda path, body: 500 if path == route else 200
    with pytest.raises(HttpStatusError, match=rf"engine 0: .*{route}\S* answered 500"), bracket_of(engines).opened("1"):
        pass
    assert [engine.asked[-1] for engine in engines] == ["/end_weight_update"] * 2
    if route != "/continue_generation":
        assert not any("/continue_generation" in engine.asked for engine in engines)


def test_after_a_failure_of_the_sender_or_of_the_check_no_engine_goes_on(engines: list[ControlRecorder]) -> None:
    with pytest.raises(ZeroDivisionError), bracket_of(engines).opened("1"):
        raise ZeroDivisionError

    def differs(version: str, *, send_seconds: float) -> None:
        raise WeightSyncError("other values")

    assert [engine.asked for engine in engines] == [ORDER[:4]] * 2
    with pytest.raises(WeightSyncError, match="other values"), bracket_of(engines).opened("1", differs):
        pass
    assert [engine.asked[4:] for engine in engines] == [[*ORDER[:4], ORDER[3]]] * 2


@pytest.mark.parametrize(("has_session", "resume"), [(True, True), (True, False), (False, True)])
def test_who_knows_that_there_is_no_further_try_lets_them_go(
    engines: list[ControlRecorder], has_session: bool, resume: bool
) -> None:
    engines[0].answer = lambda path, body: 500
    endpoints = bracket_of(engines)._calls.endpoints
    release(endpoints, has_session=has_session, timeout_seconds=1.0, resume=resume)
    expected = [ORDER[3]] * has_session + [ORDER[4]] * resume
    assert [engine.asked for engine in engines] == [expected] * 2


def test_an_engine_that_is_gone_is_named_and_does_not_keep_the_others(engines: list[ControlRecorder]) -> None:
    engines[0].server.server_close()
    with pytest.raises(EngineError, match=r"engine 0: .*cannot be reached"), bracket_of(engines).opened("1"):
        pass
    assert engines[1].asked[-1] == "/end_weight_update"


def test_a_silent_engine_is_named_in_time(engines: list[ControlRecorder]) -> None:
    over = threading.Event()
    engines[1].answer = lambda path, body: 200 + (path == "/pause_generation" and not over.wait(5))
    try:
        with (
            pytest.raises(WaitTimeoutError, match=r"engine 1: the trainer waited 0 s for .*pause_generation"),
            bracket_of(engines, timeout_seconds=0.5).opened("1"),
        ):
            pass
    finally:
        over.set()
    assert engines[0].asked[-1] == "/end_weight_update"


def test_the_routes_are_those_of_the_contract() -> None:
    routes = [api.PAUSE_GENERATION, api.FLUSH_CACHE, api.BEGIN_WEIGHT_UPDATE, api.END_WEIGHT_UPDATE]
    assert [*routes, api.CONTINUE_GENERATION] == ORDER
