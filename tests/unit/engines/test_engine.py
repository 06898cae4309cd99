"""The worker thread: calls between steps, callers who give up, and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.engines.api import RequestError
from slime.engines.embedded.engine import Engine
from tests.support.tiny_models import make_tiny_model
from tests.unit.engines.driver import Driver


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture
def engine(model_path: Path) -> Iterator[Engine]:
    driver = Driver(model_path)
    engine = Engine(driver.model, driver.scheduler, weight_version="default")
    engine.start()
    yield engine
    engine.stop()


def test_a_caller_who_gives_up_does_not_harm_the_worker(engine: Engine) -> None:
    begun, release = threading.Event(), threading.Event()
    ran: list[str] = []
    busy = engine.call(lambda: (begun.set(), release.wait(10)))
    assert begun.wait(10)
    waiting = engine.call(lambda: ran.append("cancelled"))
    assert waiting.cancel()
    assert not busy.cancel()
    release.set()
    busy.result(10)
    assert engine.call(lambda: "alive").result(10) == "alive"
    assert ran == []
    assert engine.is_healthy


def test_a_call_after_the_end_is_told_why(engine: Engine) -> None:
    engine.stop()
    with pytest.raises(RequestError, match="stopping"):
        engine.call(lambda: None).result(10)


def test_a_request_error_reaches_the_caller_and_leaves_the_worker_alive(engine: Engine) -> None:
    with pytest.raises(RequestError, match="not released"):
        engine.call(lambda: engine.reoccupy(["weights"])).result(10)
    assert engine.is_healthy
