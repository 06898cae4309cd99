"""The proof that weights arrived, against a real SGLang: a mixture of experts on two processes.

Every expected checksum is computed from the tensors of the checkpoint alone; the server computes its own over what it
holds, fused, stacked and divided over its processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slime.errors import WeightSyncError
from slime.http_control import request
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.reset_check import ResetCheck
from slime.weights.verify import WeightVerifier
from tests.sglang.servers import sglang_server
from tests.support.tiny_models import make_tiny_model, tiny_weights

NUM_TENSORS = 2 * (3 + 2 * 9)
"""Per process: embedding, norm, head; per layer two norms, the router, qkv, two head norms, output, two of experts."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # SGLang pads experts on a CPU unless both processes get a multiple of 32 columns.
    return make_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", moe_intermediate_size=64)


@pytest.fixture(scope="module")
def config(model_path: Path) -> dict[str, Any]:
    return json.loads((model_path / "config.json").read_text())


@pytest.fixture(scope="module")
def endpoint(model_path: Path) -> Iterator[EngineEndpoint]:
    with sglang_server(model_path, "--tp-size", "2") as server:
        yield EngineEndpoint(url=server.url, name="engine 3", backend="sglang", num_gpus=2)


def load(endpoint: EngineEndpoint, folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Make the server hold ``weights``."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reply = request(f"{endpoint.url}/update_weights_from_disk", {"model_path": str(folder)}, timeout_seconds=60)
    assert reply["success"], reply


def verify(checker: WeightVerifier, weights: dict[str, Tensor], version: str, send_seconds: float = 10.0) -> Any:
    checker.begin()
    checker.add(weights.items())
    return checker.check(version, send_seconds=send_seconds)


def test_every_tensor_of_every_process_is_compared(
    endpoint: EngineEndpoint, config: dict[str, Any], tmp_path: Path
) -> None:
    checker = WeightVerifier(EngineCalls([endpoint], Deadline(60)), model=config, share=None)
    for seed in (0, 1):
        weights = tiny_weights(config, seed)
        load(endpoint, tmp_path / "model", config, weights)
        result = verify(checker, weights, str(seed))
        assert (result.verified, result.deferred, result.unverified) == (NUM_TENSORS, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "place", "held_in"),
    [
        ("model.embed_tokens.weight", (0, 0), "process 0 does not hold version 8 of model.embed_tokens.weight"),
        ("lm_head.weight", (263, 63), "process 1 does not hold version 8 of lm_head.weight"),
        ("model.layers.1.self_attn.k_proj.weight", (63, 0), "process 1 .* model.layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.0.self_attn.o_proj.weight", (0, 0), "process 0 .* model.layers.0.self_attn.o_proj.weight"),
        ("model.layers.0.mlp.gate.weight", (7, 1), "process 0 .* model.layers.0.mlp.gate.weight"),
        ("model.layers.1.mlp.experts.5.up_proj.weight", (40, 2), "process 1 .* model.layers.1.mlp.experts.w13_weight"),
        ("model.layers.1.mlp.experts.7.down_proj.weight", (0, 3), "process 0 .* model.layers.1.mlp.experts.w2_weight"),
    ],
)
def test_a_wrong_value_in_the_server_is_found(
    endpoint: EngineEndpoint, config: dict[str, Any], tmp_path: Path, wrong: str, place: tuple[int, int], held_in: str
) -> None:
    checker = WeightVerifier(EngineCalls([endpoint], Deadline(60)), model=config, share=None)
    weights = tiny_weights(config, 2)
    load(endpoint, tmp_path / "model", config, weights)
    verify(checker, weights, "7")
    other = weights | {wrong: weights[wrong].clone()}
    other[wrong][place] += 1e-3
    load(endpoint, tmp_path / "model", config, other)
    with pytest.raises(WeightSyncError, match=f"engine 3 at {endpoint.url}, {held_in}") as caught:
        verify(checker, weights, "8")
    processes = 2 if "mlp.gate" in wrong else 1  # both hold the router
    assert len(str(caught.value).splitlines()) == processes


def test_the_server_is_asked_for_a_part(endpoint: EngineEndpoint, config: dict[str, Any], tmp_path: Path) -> None:
    checker = WeightVerifier(EngineCalls([endpoint], Deadline(60)), model=config)
    weights = tiny_weights(config, 3)
    load(endpoint, tmp_path / "model", config, weights)
    assert verify(checker, weights, "0", send_seconds=1e-9).verified == NUM_TENSORS
    counts = [verify(checker, weights, str(version), send_seconds=1e-9).verified for version in range(1, 6)]
    assert counts == [2, 2 * 9, 2 * 9, 2, 2], "embedding, two layers, norm, head: one at a time"


def test_a_tensor_that_no_update_writes_is_found(
    endpoint: EngineEndpoint, config: dict[str, Any], tmp_path: Path
) -> None:
    weights = tiny_weights(config, 4)
    load(endpoint, tmp_path / "model", config, weights)
    check = ResetCheck(EngineCalls([endpoint], Deadline(60)))
    check.reset()
    load(endpoint, tmp_path / "model", config, weights)
    check.compare()
    check.reset()
    del weights["model.layers.1.self_attn.q_norm.weight"]
    load(endpoint, tmp_path / "model", config, weights)
    with pytest.raises(WeightSyncError, match=r"engine 3, process 0: model\.layers\.1\.self_attn\.q_norm\.weight has"):
        check.compare()


def test_values_are_compared_bit_by_bit(endpoint: EngineEndpoint, config: dict[str, Any], tmp_path: Path) -> None:
    weights = tiny_weights(config, 5)
    name = "model.norm.weight"
    load(endpoint, tmp_path / "model", config, weights | {name: torch.nextafter(weights[name], weights[name] + 1)})
    with pytest.raises(WeightSyncError, match=name):
        verify(WeightVerifier(EngineCalls([endpoint], Deadline(60)), model=config, share=None), weights, "1")
