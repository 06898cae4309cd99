"""Emptying the cache of an engine that is not idle yet."""

from __future__ import annotations

import pytest

from slime.cluster import flush
from slime.cluster.flush import flush_cache
from slime.http_control import HttpStatusError
from tests.support.fake_control import ControlRecorder


def test_an_engine_that_is_not_idle_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "_PAUSE_SECONDS", 0.01)
    with ControlRecorder() as engine:
        engine.answer = lambda path, body: 400 if len(engine.asked) < 4 else 200
        flush_cache(engine.url, timeout_seconds=5.0)
        assert engine.asked == ["/flush_cache"] * 4


def test_it_is_not_asked_for_ever_and_not_after_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "_PATIENCE_SECONDS", 0.2)
    with ControlRecorder(lambda path, body: 400) as engine:
        with pytest.raises(HttpStatusError, match="answered 400"):
            flush_cache(engine.url, timeout_seconds=5.0)
        assert len(engine.asked) > 1
        engine.asked.clear()
        engine.answer = lambda path, body: 500
        with pytest.raises(HttpStatusError, match="answered 500"):
            flush_cache(engine.url, timeout_seconds=5.0)
        assert len(engine.asked) == 1
