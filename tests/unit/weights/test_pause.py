"""The pause mode that an update uses with an engine."""

import pytest

from slime.engines.features import EngineFeatures, features_of
from slime.errors import EngineError
from slime.weights.pause import choose_pause_mode

EMBEDDED = features_of({"engine": "embedded", "version": "1"})
NEW = features_of({"version": "0.5.23", "disaggregation_mode": "null"})
OLD = features_of({"version": "0.5.15.post1"})
UNKNOWN = features_of({})
PREFILL = features_of({"version": "0.5.23", "disaggregation_mode": "prefill"})


@pytest.mark.parametrize(
    ("asked", "engine", "routing_replay", "mode"),
    [
        ("auto", EMBEDDED, False, "retract"),
        ("auto", EMBEDDED, True, "retract"),
        ("auto", NEW, False, "retract"),
        ("auto", NEW, True, "abort"),
        ("auto", OLD, False, "abort"),
        ("auto", UNKNOWN, False, "abort"),
        ("auto", PREFILL, False, "abort"),
        ("abort", NEW, False, "abort"),
        ("abort", OLD, True, "abort"),
        ("retract", NEW, False, "retract"),
        ("in_place", OLD, True, "in_place"),
        ("in_place", EMBEDDED, False, "in_place"),
    ],
)
def test_the_mode_that_is_right_there(asked: str, engine: EngineFeatures, routing_replay: bool, mode: str) -> None:
    assert choose_pause_mode(asked, engine, name="engine 0", routing_replay=routing_replay) == mode


@pytest.mark.parametrize(
    ("engine", "routing_replay", "text"),
    [
        (OLD, False, r"engine 0 \(sglang 0\.5\.15\.post1\) cannot empty its cache.*auto or abort"),
        (PREFILL, False, "engine 0 .* keeps prompts that are half computed.*auto or abort"),
        (NEW, True, "engine 0 .* forgets the experts.*auto or abort"),
    ],
)
def test_a_retraction_that_would_be_wrong_is_refused(engine: EngineFeatures, routing_replay: bool, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        choose_pause_mode("retract", engine, name="engine 0", routing_replay=routing_replay)
