"""The checks of the HTTP contract."""

from typing import Any

import pytest

from slime.engines import api
from slime.engines.api import RequestError, SamplingParams, parse_generate, parse_message, parse_sampling_params


def test_defaults_are_those_of_the_contract() -> None:
    assert parse_sampling_params(None) == SamplingParams(
        max_new_tokens=128, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, n=1, skip_special_tokens=True
    )


def test_a_batch_is_split_with_its_columns() -> None:
    request = parse_generate(
        {
            "input_ids": [[1, 2], [3]],
            "sampling_params": [{"temperature": 0}, {"stop": "x"}],
            "return_logprob": [True, False],
            "rid": "group",
        }
    )
    assert request.is_batch
    assert [item.rid for item in request.items] == ["group_0", "group_1"]
    assert [item.input_ids for item in request.items] == [(1, 2), (3,)]
    assert [item.return_logprob for item in request.items] == [True, False]
    assert request.items[1].sampling.stop == ("x",)


def test_what_a_router_adds_is_accepted() -> None:
    body = {
        "text": "a",
        "model": "m",
        "stream": False,
        "return_hidden_states": False,
        "log_metrics": True,
        "lora_path": None,
    }
    assert parse_generate(body).items[0].text == "a"


BAD_BODIES: dict[str, tuple[Any, str]] = {
    "no object": ([], "JSON object"),
    "no prompt": ({}, "exactly one of `text` and `input_ids`"),
    "two prompts": ({"text": "a", "input_ids": [1]}, "found both"),
    "empty ids": ({"input_ids": []}, "input_ids"),
    "empty row": ({"input_ids": [[1], []]}, "empty prompt"),
    "ids of another type": ({"input_ids": [1, "a"]}, r"input_ids\[1\]"),
    "unknown field": ({"text": "a", "temperature": 1}, "unknown field `temperature`"),
    "unsupported field": ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
    "negative start of routes": ({"text": "a", "routed_experts_start_len": -1}, "routed_experts_start_len is -1"),
    "log-probs of no mask": ({"text": "a", "sampling_logprobs_mode": "support"}, "needs return_sampling_mask"),
    "unknown mode": (
        {"text": "a", "return_sampling_mask": True, "sampling_params": {"top_k": 2}, "sampling_logprobs_mode": "all"},
        "accepted: selected, support",
    ),
    "unknown sampling key": ({"text": "a", "sampling_params": {"topp": 1}}, "unknown field `sampling_params.topp`"),
    "unsupported sampling key": ({"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    "unknown custom key": ({"text": "a", "sampling_params": {"custom_params": {"x": 1}}}, "custom_params.x"),
    "wrong type": ({"text": "a", "sampling_params": {"top_k": 1.5}}, "sampling_params.top_k is 1.5"),
    "bool is no integer": ({"text": "a", "sampling_params": {"n": True}}, "sampling_params.n"),
    "out of range": ({"text": "a", "sampling_params": {"top_p": 0}}, r"top_p is 0.0; accepted: a number in \(0, 1\]"),
    "min over max": ({"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens"),
    "column length": ({"input_ids": [[1], [2]], "return_logprob": [True]}, "return_logprob has 1 entries"),
    "sampling length": ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params has 1 entries"),
    "duplicate rid": ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "duplicates"),
    "mask without truncation": ({"text": "a", "return_sampling_mask": True}, "return_sampling_mask needs"),
    "negative start": ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_generate_bodies_name_the_field(case: str) -> None:
    body, found = BAD_BODIES[case]
    with pytest.raises(RequestError, match=found) as caught:
        parse_generate(body)
    assert caught.value.status == 400


def test_control_messages_are_checked() -> None:
    assert parse_message(api.PauseMessage, {}).mode == "abort"
    assert parse_message(api.MemoryMessage, {"tags": None}).tags is None
    message = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2, 3]]}
    assert parse_message(api.UpdateFromDistributedMessage, message).shapes == [[2, 3]]
    bad: list[tuple[type, Any, str]] = [
        (api.PauseMessage, {"mode": "freeze"}, "accepted: abort, retract, in_place"),
        (api.MemoryMessage, {"tags": ["gpu"]}, "accepted: weights, kv_cache, cuda_graph"),
        (api.MemoryMessage, {"tag": "weights"}, "unknown field `tag`"),
        (api.UpdateVersionMessage, {}, "new_version"),
        (api.UpdateFromTensorMessage, {"load_format": "sharded"}, "load_format"),
        (api.UpdateFromDistributedMessage, message | {"names": []}, "equal numbers"),
        (api.UpdateFromDistributedMessage, message | {"shapes": [["a"]]}, "shapes"),
        (api.InitGroupMessage, {"master_address": "h", "master_port": "1"}, "master_port is '1'"),
    ]
    for kind, body, found in bad:
        with pytest.raises(RequestError, match=found):
            parse_message(kind, body)
