"""The pause mode that an update uses with an engine."""

import pytest

from slime.errors import EngineError
from slime.weights.pause import RetractionFacts, choose_pause_mode

EMBEDDED = RetractionFacts(name="embedded", flushes_past_waiting=True, keeps_routes=True)
NEW = RetractionFacts(name="SGLang 0.5.23", flushes_past_waiting=True, keeps_routes=False)
OLD = RetractionFacts(name="SGLang 0.5.15", flushes_past_waiting=False, keeps_routes=False)


@pytest.mark.parametrize(
    ("asked", "engine", "routing_replay", "mode"),
    [
        ("auto", EMBEDDED, False, "retract"),
        ("auto", EMBEDDED, True, "retract"),
        ("auto", NEW, False, "retract"),
        ("auto", NEW, True, "abort"),
        ("auto", OLD, False, "abort"),
        ("abort", NEW, False, "abort"),
        ("abort", OLD, True, "abort"),
        ("retract", NEW, False, "retract"),
        ("in_place", OLD, True, "in_place"),
        ("in_place", EMBEDDED, False, "in_place"),
    ],
)
def test_the_mode_that_is_right_there(asked: str, engine: RetractionFacts, routing_replay: bool, mode: str) -> None:
    assert choose_pause_mode(asked, engine, routing_replay=routing_replay) == mode


@pytest.mark.parametrize(
    ("engine", "routing_replay", "text"),
    [(OLD, False, r"SGLang 0\.5\.15 cannot empty its cache.*auto or abort"), (NEW, True, "routing-replay")],
)
def test_a_retraction_that_would_be_wrong_is_refused(engine: RetractionFacts, routing_replay: bool, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        choose_pause_mode("retract", engine, routing_replay=routing_replay)
