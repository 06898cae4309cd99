"""The stock server of the installed SGLang runs on this machine and computes what transformers computes."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
import torch
import transformers

from tests.sglang.servers import Server


def post(url: str, payload: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def test_log_probs_of_sampled_tokens_are_those_of_transformers(sglang_engine: Server) -> None:
    prompt = list(range(20, 52))
    sampling = {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True}
    payload = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    reply = post(f"{sglang_engine.url}/generate", payload)
    model = transformers.AutoModelForCausalLM.from_pretrained(sglang_engine.model_path, dtype=torch.float32)
    tokens = torch.tensor([prompt + reply["output_ids"]])
    with torch.no_grad():
        rows = torch.log_softmax(model(tokens).logits[0, len(prompt) - 1 : -1].double(), -1)
    expected = rows.gather(-1, tokens[0, len(prompt) :, None])[:, 0].tolist()
    assert len(expected) == 48
    assert [row[0] for row in reply["meta_info"]["output_token_logprobs"]] == pytest.approx(expected, abs=1e-5)
