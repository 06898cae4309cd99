"""A rollout on the embedded engine brings what training replays: kept tokens with their log-probs, and routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from slime.data.batch import build_rollout_batch
from slime.engines.embedded.flags import ServerFlags
from slime.engines.server import build_app
from slime.rollout.pipeline import generate_rollout
from slime.types import RolloutBatch
from tests.support.rollout_args import ListSource, open_context
from tests.support.tiny_models import make_tiny_model

LAYERS, TOPK = 2, 2
MODEL = {"num_layers": LAYERS, "moe_router_topk": TOPK}


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe")


@contextmanager
def recorded_router(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Sorted expert ids per layer of the next forward pass of a transformers model."""
    found: dict[int, torch.Tensor] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, i=i: found.update({i: out[2].sort(-1).values}))
        for i, layer in enumerate(model.model.layers)
    ]
    yield found
    for hook in hooks:
        hook.remove()


async def roll_out(moe_path: Path, **flags: Any) -> RolloutBatch:
    app, _ = build_app(ServerFlags(model_path=str(moe_path), max_total_tokens=20_000, random_seed=3))
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        values: dict[str, Any] = {"use_rollout_routing_replay": True, "rollout_max_response_len": 24} | flags
        with open_context(moe_path, url, custom=MODEL, **values) as context:
            source = ListSource(["abcdefgh", "xy"], 2)
            output = await asyncio.to_thread(context.generate, generate_rollout, 0, source)
            return build_rollout_batch(context.args, 0, output.samples)


@pytest.mark.parametrize(
    "flags",
    [
        {"rollout_top_p": 0.7, "rollout_temperature": 0.8},
        {"rollout_top_k": 6, "rollout_temperature": 1.3},
        {"rollout_top_p": 0.9, "rollout_top_k": 20},
        {},
    ],
    ids=str,
)
async def test_log_probs_are_those_of_what_was_kept(moe_path: Path, flags: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    batch = await roll_out(moe_path, **flags)
    model = AutoModelForCausalLM.from_pretrained(moe_path, dtype=torch.float32)
    cuts = "rollout_top_p" in flags or "rollout_top_k" in flags
    assert (batch.rollout_top_p_token_ids is not None) == cuts
    assert batch.rollout_log_probs is not None
    assert batch.rollout_routed_experts is not None
    num_kept: list[int] = []
    for i, tokens in enumerate(batch.tokens):
        with recorded_router(model) as routes, torch.inference_mode():
            logits = model(torch.tensor(tokens[None].astype(np.int64))).logits[0].double()
        start = len(tokens) - batch.response_lengths[i]
        scores = logits[start - 1 : -1] / flags.get("rollout_temperature", 1.0)
        if batch.rollout_top_p_token_ids is not None and batch.rollout_top_p_token_offsets is not None:
            sets = np.split(batch.rollout_top_p_token_ids[i], batch.rollout_top_p_token_offsets[i][1:-1])
            num_kept += [len(kept) for kept in sets]
            cut = torch.full_like(scores, -torch.inf)
            for row, kept in enumerate(sets):
                cut[row, kept] = scores[row, kept]
            scores = cut
        expected = torch.log_softmax(scores, -1).gather(1, torch.tensor(tokens[start:, None].astype(np.int64)))[:, 0]
        got = torch.from_numpy(batch.rollout_log_probs[i]).double()
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        by_layer = np.stack([routes[layer].numpy() for layer in range(LAYERS)], 1)
        np.testing.assert_array_equal(np.sort(batch.rollout_routed_experts[i], -1), by_layer[:-1])
    if cuts:
        assert 1 < np.mean(num_kept) < 200


async def test_routes_of_a_model_without_experts_are_refused(model_path: Path) -> None:
    app, _ = build_app(ServerFlags(model_path=str(model_path), skip_tokenizer_init=True))
    async with TestClient(TestServer(app)) as client:
        reply = await client.post("/generate", json={"input_ids": [1], "return_routed_experts": True})
        assert reply.status == 400
        assert "model with experts" in (await reply.json())["error"]["message"]


async def test_a_start_behind_the_prompt_is_refused(moe_path: Path) -> None:
    app, _ = build_app(ServerFlags(model_path=str(moe_path), skip_tokenizer_init=True))
    async with TestClient(TestServer(app)) as client:
        body = {"input_ids": [1, 2], "return_routed_experts": True, "routed_experts_start_len": 3}
        reply = await client.post("/generate", json=body)
        assert reply.status == 400
        assert "at most the 2 prompt tokens" in (await reply.json())["error"]["message"]
