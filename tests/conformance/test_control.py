"""Aborts, pauses, caches and status of both engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest

from slime.engines.features import ask_features
from tests.conformance.targets import PROMPT, TOLERANCE, Reference, Stream, Target, log_probs_of

LONG = {"max_new_tokens": 1900, "ignore_eos": True}


def started(target: Target, rid: str, tokens: int = 20, **sampling: object) -> Stream:
    """A long streamed request that has some of its tokens."""
    body = {"input_ids": PROMPT, "sampling_params": LONG | sampling, "return_logprob": True, "rid": rid}
    return Stream(target, body).wait_tokens(tokens)


def test_abort_returns_what_there_is(target: Target, reference: Reference) -> None:
    stream = started(target, "to-abort")
    target.post("/abort_request", {"rid": "of-nobody"})
    assert not stream.is_finished
    target.post("/abort_request", {"rid": "to-abort"})
    last = stream.result(20)
    meta = last["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["finish_reason"]["status_code"] is None
    assert 20 <= len(last["output_ids"]) == meta["completion_tokens"] < 1900
    assert log_probs_of(last) == pytest.approx(reference.log_probs(PROMPT, last["output_ids"]), abs=TOLERANCE)


def test_abort_of_a_request_that_is_not_streamed(target: Target, reference: Reference) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": PROMPT, "sampling_params": LONG, "return_logprob": True, "rid": "plain"}
        answer = pool.submit(target.generate, **body)
        sleep(0.3)
        target.post("/abort_request", {"rid": "plain"})
        reply = answer.result(30)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < 1900
    assert log_probs_of(reply) == pytest.approx(reference.log_probs(PROMPT, reply["output_ids"]), abs=TOLERANCE)


def test_abort_all(direct: Target) -> None:
    streams = [started(direct, f"all-{i}", tokens=5) for i in range(3)]
    direct.post("/abort_request", {"abort_all": True})
    assert [s.result(20)["meta_info"]["finish_reason"]["type"] for s in streams] == ["abort"] * 3


def test_pause_that_aborts_ends_what_runs_and_holds_what_comes(direct: Target) -> None:
    stream = started(direct, "ended")
    try:
        direct.post("/pause_generation", {"mode": "abort"})
        assert stream.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(direct.generate, input_ids=PROMPT, sampling_params=LONG | {"max_new_tokens": 4})
            sleep(0.5)
            assert not held.done()
            direct.post("/continue_generation")
            assert len(held.result(30)["output_ids"]) == 4
    finally:
        direct.post("/continue_generation")


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
def test_pauses_that_keep_requests(target: Target, reference: Reference, mode: str, retractions: int) -> None:
    stream = started(target, f"kept-{mode}", max_new_tokens=400)
    try:
        target.post("/pause_generation", {"mode": mode})
        sleep(0.2)
        before = len(stream.last["output_ids"])
        sleep(0.4)
        assert len(stream.last["output_ids"]) == before < 400
        # The keys and values of what was taken back may be forgotten, those of what waits in place may not.
        assert target.status("/flush_cache", {}) == (200 if mode == "retract" else 400)
    finally:
        target.post("/continue_generation")
    last = stream.result(30)
    assert last["meta_info"]["num_retractions"] == retractions
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
    assert log_probs_of(last) == pytest.approx(reference.log_probs(PROMPT, last["output_ids"]), abs=TOLERANCE)


def test_cache_is_flushed_only_when_nothing_runs(direct: Target) -> None:
    assert direct.status("/flush_cache", {}) == 200
    stream = started(direct, "busy")
    assert direct.status("/flush_cache", {}) == 400
    direct.post("/abort_request", {"rid": "busy"})
    stream.result(20)
    assert direct.status("/flush_cache?timeout=5", {}) == 200


def test_memory_can_be_given_away_and_taken_back(direct: Target, reference: Reference) -> None:
    direct.post("/flush_cache")
    assert direct.post("/release_memory_occupation", {"tags": ["kv_cache"]}) is None
    assert direct.post("/resume_memory_occupation", {"tags": ["kv_cache"]}) is None
    reply = direct.generate(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 8, "ignore_eos": True}, return_logprob=True
    )
    assert log_probs_of(reply) == pytest.approx(reference.log_probs(PROMPT, reply["output_ids"]), abs=TOLERANCE)


def test_health(direct: Target) -> None:
    assert [direct.status(path) for path in ("/health", "/health_generate", "/ready")] == [200] * 3


def test_what_an_engine_says_about_itself(direct: Target) -> None:
    model = direct.get("/model_info")
    assert model["model_path"] == str(direct.model_path)
    assert model["is_generation"] is True
    assert model["weight_version"] == "default"
    assert model["model_type"] == "qwen3"
    assert model["architectures"] == ["Qwen3ForCausalLM"]
    server = direct.get("/server_info")
    assert [server[f"{name}_size"] for name in ("tp", "pp", "dp", "ep")] == [1] * 4
    assert isinstance(server["internal_states"], list)
    features = ask_features(direct.url, timeout_seconds=30)
    assert features.backend == direct.kind
    assert features.dtype == "float32"
    assert direct.get("/v1/models")["data"][0]["id"] == str(direct.model_path)
