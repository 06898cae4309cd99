"""Pauses, aborts, caches, memory and weights of a real engine process."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines.conftest import post
from tests.support.engine_process import engine_process
from tests.support.tiny_models import make_tiny_model

PROMPT = list(range(40, 70))
LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1500}
SHORT = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A deeper model than elsewhere: long requests must still run when a test gets round to disturbing them."""
    path = make_tiny_model(tmp_path_factory.mktemp("deep"), "qwen3", num_hidden_layers=4)
    with engine_process(path, "--max-total-tokens", "100000") as url:
        yield url


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def start(pool: ThreadPoolExecutor, url: str, rid: str, sampling: dict[str, Any] = LONG) -> Future[Any]:
    """A request in the background; returns when the engine has it and works on it."""
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": rid}
    before = load(url)["num_reqs"]
    was_paused = post(url, "/server_info", method="GET")["internal_states"][0]["paused"]
    post(url, "/pause_generation", {"mode": was_paused or "in_place"})  # or it might end before anyone looks
    future = pool.submit(post, url, "/generate", body)
    wait_for(lambda: load(url)["num_reqs"] > before or future.done())
    assert not future.done(), future.result()
    if not was_paused:
        post(url, "/continue_generation")
        wait_for(lambda: load(url)["num_waiting_reqs"] == 0)
    return future


def load(url: str) -> dict[str, int]:
    return post(url, "/get_load", method="GET")[0]


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_abort_one_returns_what_there_is(engine: str, pool: ThreadPoolExecutor) -> None:
    first, second = start(pool, engine, "one"), start(pool, engine, "two", LONG | {"max_new_tokens": 900})
    assert post(engine, "/abort_request", {"rid": "nobody"}) == ""
    post(engine, "/abort_request", {"rid": "one"})
    reply = first.result(20)
    meta = reply["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 1500
    assert second.result(20)["meta_info"]["finish_reason"]["type"] == "length"


def test_abort_all_and_of_samples(engine: str, pool: ThreadPoolExecutor) -> None:
    group = start(pool, engine, "group", LONG | {"n": 3})
    other = start(pool, engine, "other")
    post(engine, "/abort_request", {"rid": "group"})
    assert [r["meta_info"]["finish_reason"]["type"] for r in group.result(20)] == ["abort"] * 3
    post(engine, "/abort_request", {"abort_all": True})
    assert other.result(20)["meta_info"]["finish_reason"]["type"] == "abort"


def test_pause_abort_ends_what_runs_and_holds_what_comes(engine: str, pool: ThreadPoolExecutor) -> None:
    running = start(pool, engine, "a")
    assert post(engine, "/pause_generation", {"mode": "abort"})["status"] == "ok"
    assert running.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    assert load(engine)["num_reqs"] == 0
    later = start(pool, engine, "b", SHORT)
    time.sleep(0.1)
    assert not later.done()
    post(engine, "/continue_generation")
    assert later.result(20)["meta_info"]["completion_tokens"] == 8


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_as_if_nothing_had_been(engine: str, pool: ThreadPoolExecutor, mode: str) -> None:
    sampling = LONG | {"max_new_tokens": 1500}
    expected = post(engine, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})["output_ids"]
    running = start(pool, engine, mode, sampling)
    post(engine, "/pause_generation", {"mode": mode})
    if mode == "in_place":
        assert "not flushed" in post(engine, "/flush_cache", expect=400)
    else:
        assert "flushed" in post(engine, "/flush_cache")
        assert load(engine)["num_tokens"] == 0
    post(engine, "/continue_generation")
    reply = running.result(30)
    assert reply["output_ids"] == expected
    assert reply["meta_info"]["num_retractions"] == (mode == "retract")


def test_flush_waits_when_asked(engine: str, pool: ThreadPoolExecutor) -> None:
    running = start(pool, engine, "f", LONG | {"max_new_tokens": 1500})
    assert "1 requests running" in post(engine, "/flush_cache", expect=400)
    assert "flushed" in post(engine, "/flush_cache?timeout=20")
    assert running.result(20)["meta_info"]["completion_tokens"] == 1500
    assert "accepted: seconds" in post(engine, "/flush_cache?timeout=soon", expect=400)["error"]["message"]


def test_weights_change_in_the_middle_of_a_request(model_path: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, "qwen3", seed=5)
    with engine_process(model_path, "--weight-version", "v1") as url, ThreadPoolExecutor(1) as pool:
        running = start(pool, url, "m", LONG | {"max_new_tokens": 1500})
        post(url, "/pause_generation", {"mode": "in_place"})
        refused = post(url, "/update_weights_from_disk", {"model_path": str(other)}, expect=400)
        assert "flush_cache: false" in refused["message"]
        body = {"model_path": str(other), "weight_version": "v2", "flush_cache": False}
        assert post(url, "/update_weights_from_disk", body)["success"]
        post(url, "/continue_generation")
        meta = running.result(30)["meta_info"]
        first, second = meta["weight_versions"]
        assert (first["version"], first["start"], second["version"], second["end"]) == ("v1", 0, "v2", 1500)
        assert 0 < first["end"] == second["start"] < 1500
        assert meta["weight_version"] == "v2"
        assert post(url, "/model_info", method="GET")["weight_version"] == "v2"


def test_disk_updates_that_do_not_fit(engine: str, tmp_path: Path) -> None:
    before = post(engine, "/weights_checker", {"action": "checksum"})["ranks"]
    reply = post(engine, "/update_weights_from_disk", {"model_path": str(tmp_path / "none")}, expect=400)
    assert not reply["success"]
    smaller = make_tiny_model(tmp_path, "qwen3", vocab_size=128, tokenizer=False)
    reply = post(engine, "/update_weights_from_disk", {"model_path": str(smaller)}, expect=400)
    assert "comes with shape [128, 64]; the model has [264, 64]" in reply["message"]
    assert post(engine, "/weights_checker", {"action": "checksum"})["ranks"] == before


def test_updates_need_their_bracket(engine: str) -> None:
    body = {"serialized_named_tensors": [""]}
    assert "begin_weight_update" in post(engine, "/update_weights_from_tensor", body, expect=400)["message"]
    assert "no weight update has begun" in post(engine, "/end_weight_update", expect=400)["message"]
    assert post(engine, "/begin_weight_update")["success"]
    assert "has begun already" in post(engine, "/begin_weight_update", expect=400)["message"]
    assert post(engine, "/end_weight_update")["message"] == "weights complete"


def test_version_names(engine: str, pool: ThreadPoolExecutor) -> None:
    old = post(engine, "/model_info", method="GET")["weight_version"]
    running = start(pool, engine, "v")
    reply = post(engine, "/update_weight_version", {"new_version": "renamed"})
    assert (reply["success"], reply["new_version"]) == (True, "renamed")
    assert running.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    post(engine, "/update_weight_version", {"new_version": old, "abort_all_requests": False})
    assert post(engine, "/model_info", method="GET")["weight_version"] == old


def test_snapshot_reset_compare(model_path: Path) -> None:
    with engine_process(model_path, "--skip-tokenizer-init") as url:
        assert "snapshot first" in post(url, "/weights_checker", {"action": "compare"}, expect=400)["error"]["message"]
        post(url, "/weights_checker", {"action": "snapshot"})
        assert post(url, "/weights_checker", {"action": "compare"})["success"]
        post(url, "/weights_checker", {"action": "reset_tensors"})
        assert post(url, "/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 3}) == [0.0, 0.0, 0.0]
        assert "25 tensors differ" in post(url, "/weights_checker", {"action": "compare"}, expect=400)["message"]
        assert post(url, "/update_weights_from_disk", {"model_path": str(model_path)})["success"]
        assert post(url, "/weights_checker", {"action": "compare"})["success"]
        assert "no tensor 'x'" in post(url, "/get_weights_by_name", {"name": "x"}, expect=400)["error"]["message"]
        reply = post(url, "/generate", {"input_ids": PROMPT, "sampling_params": SHORT})
        assert reply["text"] == ""
        assert "skip-tokenizer-init" in post(url, "/generate", {"text": "a"}, expect=400)["error"]["message"]


def test_released_memory(tmp_path: Path) -> None:
    big = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6}
    path = make_tiny_model(tmp_path, "llama", tokenizer=False, **big)
    with engine_process(path, "--skip-tokenizer-init") as url, ThreadPoolExecutor(1) as pool:
        pid = _pid_of(url)
        post(url, "/generate", {"input_ids": PROMPT, "sampling_params": SHORT})
        running = start(pool, url, "r")
        assert "pause" in post(url, "/release_memory_occupation", expect=400)["error"]["message"]
        post(url, "/abort_request", {"abort_all": True})
        running.result(20)
        full = _resident_bytes(pid)
        assert post(url, "/release_memory_occupation") is None
        weights = sum(p.stat().st_size for p in path.glob("*.safetensors"))
        assert full - _resident_bytes(pid) > 0.8 * weights
        body = {"input_ids": PROMPT, "sampling_params": SHORT}
        assert "released" in post(url, "/generate", body, expect=400)["error"]["message"]
        assert post(url, "/health_generate", method="GET") == ""
        assert post(url, "/resume_memory_occupation", {"tags": ["weights"]}) is None
        assert (
            "not released"
            in post(url, "/resume_memory_occupation", {"tags": ["weights"]}, expect=400)["error"]["message"]
        )
        assert post(url, "/resume_memory_occupation") is None
        assert "hold no values" in post(url, "/generate", body, expect=400)["error"]["message"]
        assert post(url, "/update_weights_from_disk", {"model_path": str(path)})["success"]
        assert len(post(url, "/generate", body)["output_ids"]) == 8


def _pid_of(url: str) -> int:
    port = url.rsplit(":", 1)[1]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"slime.engines.server" in command and port.encode() in command:
                return int(entry.name)
    raise AssertionError("no such process")


def _resident_bytes(pid: int) -> int:
    status = (Path("/proc") / str(pid) / "status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) * 1024


def test_a_storm_of_everything_leaves_the_engine_whole(engine: str) -> None:
    """Requests, aborts, pauses and flushes from several threads; afterwards the answers are what they were."""
    body = {"input_ids": PROMPT, "sampling_params": SHORT | {"max_new_tokens": 30}, "return_logprob": True}
    expected = post(engine, "/generate", body)
    stop = threading.Event()

    def disturb() -> None:
        for i in range(30):
            mode = ("retract", "in_place", "abort")[i % 3]
            post(engine, "/pause_generation", {"mode": mode})
            if i % 4 == 0:
                post(engine, "/abort_request", {"abort_all": True})
            post(engine, "/continue_generation")
            time.sleep(0.01)
        stop.set()

    def ask(i: int) -> list[dict[str, Any]]:
        replies = []
        while not stop.is_set():
            replies.append(post(engine, "/generate", body | {"input_ids": PROMPT[: len(PROMPT) - i]}))
        return replies

    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(ask, i) for i in range(4)]
        pool.submit(disturb).result(60)
        replies = [answer.result(60) for answer in answers]
    whole = [r for r in replies[0] if r["meta_info"]["finish_reason"]["type"] == "length"]
    assert all(r["output_ids"] == expected["output_ids"] for r in whole)
    for reply in replies[0]:
        count = len(reply["output_ids"])
        assert reply["output_ids"] == expected["output_ids"][:count]
    assert json.dumps(post(engine, "/generate", body)["output_ids"]) == json.dumps(expected["output_ids"])
