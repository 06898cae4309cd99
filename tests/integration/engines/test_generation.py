"""/generate of a real engine process: shapes, sampling, streams, errors."""

import asyncio
import base64
import itertools
import json
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.integration.engines.conftest import post

PROMPT = list(range(40, 70))
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}


def test_one_reply_has_every_field(engine: str) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0, "rid": "x1"}
    reply = post(engine, "/generate", body | {"top_logprobs_num": 3, "return_text_in_logprobs": True})
    meta = reply["meta_info"]
    assert meta["id"] == "x1"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (30, 8, 0)
    assert [t[1] for t in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["output_token_logprobs_length"] == 8
    assert meta["input_token_logprobs"][0][0] is None
    assert [t[1] for t in meta["input_token_logprobs"]] == PROMPT
    assert all(len(row) == 3 for row in meta["output_top_logprobs"])
    assert [row[0][:2] for row in meta["output_top_logprobs"]] == [t[:2] for t in meta["output_token_logprobs"]]
    assert isinstance(meta["output_token_logprobs"][0][2], str)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 8}]
    assert meta["e2e_latency"] > 0


def test_text_and_ids_agree(engine: str) -> None:
    from_text = post(engine, "/generate", {"text": "hello", "sampling_params": GREEDY})
    ids = [71, 68, 75, 75, 78]  # the byte-level alphabet starts at "!"
    assert post(engine, "/generate", {"input_ids": ids, "sampling_params": GREEDY})["text"] == from_text["text"]


def test_batches_and_samples_come_in_order(engine: str) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 6, "n": 2, "sampling_seed": 4}
    body = {"input_ids": [PROMPT, PROMPT[:5]], "sampling_params": sampling, "rid": "b"}
    replies = post(engine, "/generate", body)
    assert [r["meta_info"]["id"] for r in replies] == ["b_0_0", "b_0_1", "b_1_0", "b_1_1"]
    assert [r["meta_info"]["prompt_tokens"] for r in replies] == [30, 30, 5, 5]
    assert replies[0]["output_ids"] != replies[1]["output_ids"]
    assert [r["output_ids"] for r in post(engine, "/generate", body)] == [r["output_ids"] for r in replies]
    single = post(engine, "/generate", {"input_ids": PROMPT, "sampling_params": sampling | {"n": 1}})
    assert single["output_ids"] == replies[0]["output_ids"]


def test_a_group_shares_its_prompt(engine: str) -> None:
    prompt = [7, *PROMPT]
    replies = post(engine, "/generate", {"input_ids": prompt, "sampling_params": GREEDY | {"n": 4}})
    assert [r["meta_info"]["cached_tokens"] for r in replies] == [0, 30, 30, 30]
    later = post(engine, "/generate", {"input_ids": prompt, "sampling_params": GREEDY})
    assert later["meta_info"]["cached_tokens"] == 30
    assert later["output_ids"] == replies[0]["output_ids"]


def test_stop_strings_and_tokens(engine: str) -> None:
    free = post(engine, "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY | {"max_new_tokens": 40}})
    text = free["text"]
    readable = next(c for c in text if c.isascii() and c.isprintable())
    body = {"input_ids": PROMPT, "sampling_params": GREEDY | {"max_new_tokens": 40, "stop": [readable]}}
    stopped = post(engine, "/generate", body)
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": readable}
    assert stopped["text"] == text[: text.index(readable)]
    body["sampling_params"] |= {"no_stop_trim": True}
    assert post(engine, "/generate", body)["text"] == text[: text.index(readable) + 1]
    token = free["output_ids"][0]
    sampling = GREEDY | {"stop_token_ids": [token], "ignore_eos": False}
    by_token = post(engine, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert by_token["output_ids"][-1] == token  # ids include what stopped


def test_kept_token_sets(engine: str) -> None:
    sampling = {
        "top_p": 0.5,
        "max_new_tokens": 4,
        "ignore_eos": True,
        "custom_params": {"return_top_p_token_ids": True},
    }
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_sampling_mask": True}
    reply = post(engine, "/generate", body)
    meta = reply["meta_info"]
    offsets = np.frombuffer(base64.b64decode(meta["top_p_token_offsets"]), dtype=np.int32)
    flat = np.frombuffer(base64.b64decode(meta["top_p_token_ids"]), dtype=np.int32)
    sets = [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert sets == meta["output_token_sampling_mask"]
    assert all(token in kept for token, kept in zip(reply["output_ids"], sets, strict=True))


async def read_stream(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/generate", json=body | {"stream": True}) as reply,
    ):
        assert reply.content_type == "text/event-stream"
        lines = [line async for line in reply.content if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_streams_are_cumulative(engine: str) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY | {"max_new_tokens": 30}, "return_logprob": True}
    whole = post(engine, "/generate", body)
    chunks = await read_stream(engine, body)
    assert len(chunks) > 3
    for chunk in chunks:
        count = len(chunk["output_ids"])
        assert chunk["output_ids"] == whole["output_ids"][:count]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == count
        assert (chunk["meta_info"]["finish_reason"] is None) == (chunk is not chunks[-1])
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    several = await read_stream(engine, body | {"sampling_params": GREEDY | {"n": 2}})
    assert {chunk["index"] for chunk in several} == {0, 1}


async def test_a_client_that_goes_away_ends_its_request(engine: str) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
    async with aiohttp.ClientSession() as session:
        with pytest.raises(asyncio.TimeoutError):
            await session.post(engine + "/generate", json=body, timeout=aiohttp.ClientTimeout(total=0.3))
    for _ in range(100):
        if post(engine, "/get_load", method="GET")[0]["num_reqs"] == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the request still runs")


async def test_many_clients_at_once_get_what_they_get_alone(engine: str) -> None:
    async def ask(session: aiohttp.ClientSession, i: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": 5 + i % 9, "sampling_seed": i, "ignore_eos": True, "temperature": 0.8}
        body = {"input_ids": PROMPT[: 1 + i % 20], "sampling_params": sampling, "return_logprob": True}
        async with session.post(engine + "/generate", json=body) as reply:
            return await reply.json()

    async with aiohttp.ClientSession() as session:
        together = await asyncio.gather(*(ask(session, i) for i in range(60)))
        for i in range(0, 60, 7):
            alone = await ask(session, i)
            assert alone["output_ids"] == together[i]["output_ids"]
            pairs = zip(
                alone["meta_info"]["output_token_logprobs"],
                together[i]["meta_info"]["output_token_logprobs"],
                strict=True,
            )
            assert all(abs(a[0] - b[0]) < 1e-5 for a, b in pairs)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown sampling key": ({"text": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    "token out of range": ({"input_ids": [1, 999]}, "input_ids has 999; accepted: token ids in [0, 264)"),
    "too long": (
        {"input_ids": [1] * 3000},
        "The input (3000 tokens) is longer than the model's context length (2048 tokens).",
    ),
    "too long with output": (
        {"input_ids": [1] * 2000, "sampling_params": {"max_new_tokens": 100}},
        "Lower max_new_tokens to 48",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_name_the_fault(engine: str, case: str) -> None:
    body, found = BAD[case]
    assert found in post(engine, "/generate", body, expect=400)["error"]["message"]


def test_paths_and_bodies_that_make_no_sense(engine: str) -> None:
    assert "Not Found" in post(engine, "/nothing", expect=404)["error"]["message"]
    assert "Method Not Allowed" in post(engine, "/generate", method="GET", expect=405)["error"]["message"]
    assert "JSON object" in post(engine, "/generate", [1], expect=400)["error"]["message"]


def test_status_endpoints(engine: str, model_path: object) -> None:
    for path in ("/health", "/ready", "/health_generate"):
        assert post(engine, path, method="GET") == ""
    for path in ("/model_info", "/get_model_info"):
        info = post(engine, path, method="GET")
        assert (info["model_path"], info["model_type"]) == (str(model_path), "qwen3")
        assert info["architectures"] == ["Qwen3ForCausalLM"]
    for path in ("/server_info", "/get_server_info"):
        info = post(engine, path, method="GET")
        assert (info["dtype"], info["tp_size"], info["context_length"]) == ("float32", 1, 2048)
    assert post(engine, "/v1/loads", method="GET")["loads"][0]["num_running_reqs"] == 0
    assert post(engine, "/v1/models", method="GET")["data"][0]["id"] == str(model_path)
