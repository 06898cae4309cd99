"""A stock SGLang engine of two processes: started by the product, and asked as one that runs already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from slime.cluster.engines import EngineGroup
from slime.cluster.placement import Placement
from slime.cluster.ray_session import guarded_processes, ray_session
from slime.cluster.registration import workers
from slime.config import ClusterConfig, Config, DebugConfig, EngineConfig, RolloutConfig, TrainConfig
from slime.config.external import ExternalEngine, read_external
from slime.engines.features import ask_server_info
from slime.http_control import request
from tests.support.engine_groups import running_engines
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def config(model: Path) -> Config:
    return Config(
        cluster=ClusterConfig(device="cpu", rollout_num_gpus=2, rollout_num_gpus_per_engine=2),
        train=TrainConfig(precision="fp32"),
        rollout=RolloutConfig(hf_checkpoint=str(model)),
        engine=EngineConfig(engine_start_timeout_seconds=400, rollout_backend="sglang"),
        sglang={"max_total_tokens": 4096, "max_running_requests": 8},
        debug=DebugConfig(debug_rollout_only=True),
    )


@pytest.fixture(scope="module")
def group(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineGroup]:
    with (
        guarded_processes() as guardian,
        ray_session("cpu", 2, guardian.scratch_dir),
        running_engines(config, tmp_path_factory.mktemp("logs")) as started,
    ):
        yield started


def test_two_processes_compute_what_the_model_does(group: EngineGroup, model: Path) -> None:
    """Log-probs through the router against transformers, with every layer split over two processes."""
    (endpoint,) = group.endpoints
    assert (endpoint.name, endpoint.backend, endpoint.num_gpus, endpoint.gpu_ids) == ("engine 0", "sglang", 2, ())
    info = ask_server_info(endpoint.url, timeout_seconds=30)
    assert (info["tp_size"], info["nnodes"], info["random_seed"]) == (2, 1, 42)
    payload = {
        "input_ids": [11, 12, 13],
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "temperature": 1.0},
        "return_logprob": True,
    }
    reply = request(f"{group.router_url}/generate", payload, timeout_seconds=60)
    triples = reply["meta_info"]["output_token_logprobs"]
    ids = [11, 12, 13, *(triple[1] for triple in triples)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        rows = torch.log_softmax(reference(torch.tensor([ids])).logits[0], dim=-1)
    expected = [float(rows[position - 1, ids[position]]) for position in range(3, len(ids))]
    assert [triple[0] for triple in triples] == pytest.approx(expected, abs=1e-5)


def test_its_own_words_describe_it_as_one_that_runs_already(
    group: EngineGroup, config: Config, model: Path, tmp_path: Path
) -> None:
    (url,) = group.urls
    engine = read_external(url, ask_server_info(url, timeout_seconds=30))
    assert engine == ExternalEngine(url=url, backend="sglang", num_gpus=2, worker_type="regular", model_path=str(model))
    outside = replace(
        config,
        external_engines=(engine,),
        rollout=replace(config.rollout, rollout_external_engine_addrs=(url,)),
    )
    second = EngineGroup(outside, Placement(outside.layout, device="cpu", timeout_seconds=30), tmp_path)
    try:
        second.start_router()
        second.launch()
        second.wait_ready()
        assert [w["url"] for w in workers(second.router_url, 10)] == [url]
        (endpoint,) = second.endpoints
        assert (endpoint.num_gpus, endpoint.node_id) == (2, group.endpoints[0].node_id)
        assert second.weight_versions() == ["default"]
    finally:
        second.close()
    assert request(f"{url}/model_info", timeout_seconds=30)["model_path"] == str(model)
