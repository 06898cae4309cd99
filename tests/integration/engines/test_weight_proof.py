"""The proof that weights arrived, against a real embedded engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from slime.errors import WeightSyncError
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.reset_check import ResetCheck
from slime.weights.verify import Verification, WeightVerifier
from tests.integration.engines.conftest import post
from tests.support.engine_process import engine_process
from tests.support.tiny_models import make_tiny_model, tiny_weights


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("proof"), "qwen3_moe")


@pytest.fixture(scope="module")
def config(model_path: Path) -> dict[str, Any]:
    return json.loads((model_path / "config.json").read_text())


@pytest.fixture(scope="module")
def endpoint(model_path: Path) -> Iterator[EngineEndpoint]:
    with engine_process(model_path, "--skip-tokenizer-init") as url:
        yield EngineEndpoint(url=url, name="engine 1", backend="embedded")


def load(endpoint: EngineEndpoint, folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Make the engine hold ``weights``."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert post(endpoint.url, "/update_weights_from_disk", {"model_path": str(folder)})["success"]


def verify(
    checker: WeightVerifier, weights: dict[str, Tensor], version: str, send_seconds: float = 10.0
) -> Verification:
    checker.begin()
    checker.add(weights.items())
    return checker.check(version, send_seconds=send_seconds)


def test_a_wrong_value_in_any_tensor_is_found(endpoint: EngineEndpoint, config: dict[str, Any], tmp_path: Path) -> None:
    checker = WeightVerifier(EngineCalls([endpoint], Deadline(60)), model=config, share=None)
    weights = tiny_weights(config, 1)
    load(endpoint, tmp_path, config, weights)
    result = verify(checker, weights, "7")
    assert (result.verified, result.deferred, result.unverified) == (len(weights), 0, 0)
    planted = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.experts.6.down_proj.weight",
        "lm_head.weight",
    ]
    other = {name: tensor.clone() for name, tensor in weights.items()}
    for name in planted:
        other[name][-1, -1] += 1e-3
    load(endpoint, tmp_path, config, other)
    with pytest.raises(WeightSyncError) as caught:
        verify(checker, weights, "8")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(planted)
    for name in planted:
        assert any(f"engine 1 at {endpoint.url} does not hold version 8 of {name}: " in line for line in lines)


def test_the_engine_is_asked_for_a_part(endpoint: EngineEndpoint, config: dict[str, Any], tmp_path: Path) -> None:
    checker = WeightVerifier(EngineCalls([endpoint], Deadline(60)), model=config)
    weights = tiny_weights(config, 2)
    load(endpoint, tmp_path, config, weights)
    assert verify(checker, weights, "0", send_seconds=1e-9).verified == len(weights)
    results = [verify(checker, weights, str(version), send_seconds=1e-9) for version in range(1, 6)]
    assert sum(result.verified for result in results) == len(weights), "embedding, two layers, norm, head in turn"
    assert all(result.verified + result.deferred == len(weights) for result in results)
    part = post(endpoint.url, "/weights_checker", {"skip_tensor_list": ["layers.", "lm_head"]})
    assert part["ranks"][0]["checksums"].keys() == {"model.embed_tokens.weight", "model.norm.weight"}


def test_a_tensor_that_no_update_writes_is_found(
    endpoint: EngineEndpoint, config: dict[str, Any], tmp_path: Path
) -> None:
    weights = tiny_weights(config, 3)
    load(endpoint, tmp_path, config, weights)
    check = ResetCheck(EngineCalls([endpoint], Deadline(60)))
    check.reset()
    load(endpoint, tmp_path, config, weights)
    check.compare()
    check.reset()
    with pytest.raises(WeightSyncError, match=f"{len(weights)} tensors differ from the snapshot"):
        check.compare()
