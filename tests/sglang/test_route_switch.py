"""Routed experts across a change of weights on the real SGLang: why routing replay wants ``abort`` there.

A row of the record belongs to the pass that drew the next token. The reference routes whole sequences by transformers
with the weights of that pass.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.engines.api import PauseMode
from slime.http_control import request
from slime.rollout.context import RolloutContext
from slime.rollout.pipeline import generate_rollout
from slime.types import Sample
from tests.sglang.servers import Server, sglang_server
from tests.support.engine_process import router_process
from tests.support.rollout_args import ListSource, open_context
from tests.support.tiny_models import make_tiny_model
from tests.support.version_check import change_weights, transformers_log_probs, worst_difference

pytestmark = pytest.mark.timeout(300)

LENGTH = 200
LAYERS, TOPK = 2, 2


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("versions")
    return {v: make_tiny_model(folder / v, "qwen3_moe", seed=int(v)) for v in ("1", "2")}


@pytest.fixture(scope="module")
def server(paths: dict[str, Path]) -> Any:
    with sglang_server(paths["1"], "--weight-version", "1", "--enable-return-routed-experts") as running:
        yield running


@torch.no_grad()
def routes_of(path: Path, tokens: list[int]) -> np.ndarray:
    """``[n, layers, top-k]`` experts that the weights of a directory send each token to, in rising order."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(TOPK, -1).indices.sort(-1).values for layer in logits], 1).numpy()


def generate(context: RolloutContext) -> Sample:
    context.sampling_params["ignore_eos"] = True
    return context.generate(generate_rollout, 0, ListSource(["a prompt for experts"], 1)).samples[0][0]


def seconds_of_tokens(url: str, count: int) -> float:
    """How long this server needs for ``count`` tokens now, on whatever machine and under whatever load."""
    sampling = {"max_new_tokens": count, "ignore_eos": True}
    started = time.monotonic()
    request(f"{url}/generate", {"input_ids": [65, 66, 67], "sampling_params": sampling}, timeout_seconds=60)
    return time.monotonic() - started


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_routes_across_a_switch(mode: PauseMode, paths: dict[str, Path], server: Server) -> None:
    change_weights(server.url, paths["1"], "1", "abort")
    flags: dict[str, Any] = {
        "rollout_batch_size": 1, "n_samples_per_prompt": 1, "rollout_max_response_len": LENGTH,
        "use_rollout_routing_replay": True, "custom": {"num_layers": LAYERS, "moe_router_topk": TOPK},
    }  # fmt: skip
    with (
        router_process([server.url]) as router,
        open_context(paths["1"], router, **flags) as context,
        ThreadPoolExecutor(1) as pool,
    ):
        seconds = seconds_of_tokens(server.url, LENGTH // 2)
        rollout = pool.submit(generate, context)
        time.sleep(seconds)
        change_weights(server.url, paths["2"], "2", mode)
        sample = rollout.result(60)
    spans = sample.weight_version_spans
    assert [span.version for span in spans] == ["1", "2"]
    models = {version: transformers_log_probs(path) for version, path in paths.items()}
    assert sample.rollout_log_probs is not None
    assert max(worst_difference(sample.tokens, sample.rollout_log_probs, spans, models).values()) <= 1e-5
    prompt_length = len(sample.tokens) - LENGTH
    drawn_by = np.ones(prompt_length - 1 + LENGTH)  # of the next token
    for span in spans:
        drawn_by[prompt_length - 1 + span.start : prompt_length - 1 + span.end] = int(span.version)
    by_old, by_new = (routes_of(paths[v], sample.tokens)[:-1] for v in ("1", "2"))
    expected = np.where(drawn_by[:, None, None] == 1, by_old, by_new)
    assert (by_old != by_new).any(-1).mean() > 0.5
    assert sample.rollout_routed_experts is not None
    routes = np.sort(sample.rollout_routed_experts, -1)
    same_as = {name: float((routes == rows).all(-1).mean()) for name, rows in (("expected", expected), ("new", by_new))}
    # Ties aside. A retraction reports what the second pass chose for tokens that the first one drew.
    assert same_as["expected" if mode == "abort" else "new"] > 0.99, same_as
    assert same_as["new" if mode == "abort" else "expected"] < 0.9, same_as
