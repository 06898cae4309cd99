"""The stock server generates with published weights: its log-probs are those that transformers computes from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from slime.errors import WeightSyncError
from slime.weights.delta import DeltaForm, DeltaPublisher
from slime.weights.disk import CheckpointPublisher
from slime.weights.endpoint import EngineEndpoint
from slime.weights.from_files import FileSettings, FileUpdater, PostWriteHook
from slime.weights.host_pull import pull
from slime.weights.verify import WeightVerifier
from tests.sglang.servers import Server, sglang_server
from tests.sglang.test_server_starts import post
from tests.support.tiny_models import make_tiny_model, tiny_weights
from tests.support.weight_updates import let_go

Weights = dict[str, torch.Tensor]
PROMPT = list(range(20, 52))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with sglang_server(make_tiny_model(tmp_path_factory.mktemp("published") / "qwen3", "qwen3")) as started:
        yield started


def updater(publisher: Any, server: Server, local: Path, hook: PostWriteHook | None = None) -> FileUpdater:
    config = json.loads((server.model_path / "config.json").read_text())
    settings = FileSettings(
        timeout_seconds=120,
        post_write=hook,
        pause_mode=lambda _: "retract",
        verifier=lambda calls: WeightVerifier(calls, model=config, share=None),
    )
    way = FileUpdater(settings, lambda: publisher, rank=0, world_size=1)
    endpoint = EngineEndpoint(
        url=server.url, name="engine 0", backend="sglang", local_dir=str(local), pull=lambda request: [pull(request)]
    )
    way.connect([endpoint])
    return way


def weights_of(server: Server, seed: int) -> Weights:
    return tiny_weights(json.loads((server.model_path / "config.json").read_text()), seed)


def whole(disk: Path, server: Server) -> CheckpointPublisher:
    return CheckpointPublisher(disk, server.model_path, keep_files=False, is_pulled=False, pre_read_hook=None)


def assert_generates_with(server: Server, weights: Weights, version: str, scratch: Path) -> None:
    sampling = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    payload = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    reply = post(f"{server.url}/generate", payload)
    reference = scratch / f"reference{version}"
    shutil.copytree(server.model_path, reference)
    save_file(weights, reference / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    tokens = torch.tensor([PROMPT + reply["output_ids"]])
    with torch.no_grad():
        rows = torch.log_softmax(model(tokens).logits[0, len(PROMPT) - 1 : -1].double(), -1)
    expected = rows.gather(-1, tokens[0, len(PROMPT) :, None])[:, 0].tolist()
    assert len(expected) == 24
    assert [row[0] for row in reply["meta_info"]["output_token_logprobs"]] == pytest.approx(expected, abs=1e-5)
    assert reply["meta_info"]["weight_version"] == version


def test_whole_checkpoints(server: Server, tmp_path: Path) -> None:
    way = updater(whole(tmp_path / "shared", server), server, tmp_path / "unused")
    weights = weights_of(server, 31)
    report = way.update(iter([list(weights.items())]), "31")
    assert report.metrics["perf/update_weights_unverified"] == 0
    assert report.verified > len(weights) // 2  # fused ones count once
    assert_generates_with(server, weights, "31", tmp_path)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_deltas(server: Server, tmp_path: Path, encoding: Any) -> None:
    form = DeltaForm(encoding=encoding, checksum_format="blake3")
    publisher = DeltaPublisher(tmp_path / "shared", server.model_path, form, pre_read_hook=None)
    way = updater(publisher, server, tmp_path / "local")
    weights = weights_of(server, 0)
    for version in ("1", "2"):
        weights = {k: t + 1e-3 * torch.randn_like(t) if "layers.0" in k else t for k, t in weights.items()}
        report = way.update(iter([list(weights.items())]), version)
        assert report.metrics["perf/update_weights_unverified"] == 0
        assert_generates_with(server, weights, version, tmp_path)
    assert 0 < report.metrics["perf/update_weights_density"] < 0.6


def test_a_directory_it_cannot_see_is_named_and_it_goes_on(server: Server, tmp_path: Path) -> None:
    weights = weights_of(server, 33)
    updater(whole(tmp_path / "shared", server), server, tmp_path / "unused").update(iter([list(weights.items())]), "33")

    def hide(directory: str, engines: Sequence[EngineEndpoint]) -> None:
        shutil.rmtree(directory)

    blind = updater(whole(tmp_path / "shared", server), server, tmp_path / "unused", hide)
    with pytest.raises(WeightSyncError, match=r"engine 0: .*weight_v000034.*must see this directory"):
        blind.update(iter([list(weights_of(server, 34).items())]), "34")
    let_go([server.url])
    assert_generates_with(server, weights, "33", tmp_path)
