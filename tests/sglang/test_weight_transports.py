"""Weights into real SGLang servers, one of a single process and one of two, by memory and by broadcast.

The proof is the server's: it computes checksums over what each of its processes holds, and log-probs of its tokens,
which transformers computes from the weights that were sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.errors import WeightSyncError
from slime.http_control import request
from tests.sglang.servers import sglang_server
from tests.support.tiny_models import make_tiny_model
from tests.support.version_check import transformers_log_probs
from tests.support.weight_updates import as_bucket, shared_memory_files, updater_of

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
PROMPT = list(range(20, 50))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served"), "qwen3")


@pytest.fixture(scope="module")
def urls(model_path: Path) -> Iterator[list[str]]:
    with sglang_server(model_path) as one, sglang_server(model_path, "--tp-size", "2") as two:
        yield [one.url, two.url]


@pytest.mark.parametrize(("carrier", "seed"), [("tensor", 3), ("broadcast", 4)])
def test_servers_of_one_and_two_processes_take_new_weights(
    urls: list[str], model_path: Path, tmp_path: Path, carrier: str, seed: int
) -> None:
    new = make_tiny_model(tmp_path / "new", "qwen3", seed=seed)
    weights = load_file(new / "model.safetensors")
    files = shared_memory_files()
    with updater_of(urls, carrier=carrier, bucket_bytes=100_000, model=model_path, backend="sglang") as updater:
        report = updater.update([as_bucket(weights)], str(seed))
    assert report.tensors == len(weights)
    assert report.verified > 0
    assert report.metrics["perf/update_weights_unverified"] == 0
    assert shared_memory_files() <= files
    reference = transformers_log_probs(new)
    for url in urls:
        sampling = {"max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        reply = request(url + "/generate", body, timeout_seconds=60)
        assert reply["meta_info"]["weight_version"] == str(seed)
        got = torch.tensor([row[0] for row in reply["meta_info"]["output_token_logprobs"]])
        expected = reference([*PROMPT, *reply["output_ids"]])[len(PROMPT) - 1 :]
        assert (got - torch.as_tensor(expected)).abs().max() <= TOLERANCE


def test_a_refused_tensor_leaves_the_servers_alive_and_ready(urls: list[str], model_path: Path) -> None:
    """By broadcast: of tensors in memory SGLang takes the shapes on trust and dies of a wrong one."""
    with (
        updater_of(urls, carrier="broadcast", backend="sglang") as updater,
        pytest.raises(WeightSyncError, match=r"version bad, tensors model\.norm\.weight .*: engine \d: "),
    ):
        updater.update([[("model.norm.weight", torch.zeros(3))]], "bad")
    weights = load_file(model_path / "model.safetensors")
    with updater_of(urls, model=model_path, backend="sglang") as updater:
        updater.update([as_bucket(weights)], "good")
    for url in urls:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert request(url + "/generate", body, timeout_seconds=60)["meta_info"]["weight_version"] == "good"
