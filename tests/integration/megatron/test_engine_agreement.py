"""Trainer and engine: equal log-probs for equal weights, before and after a training step, at any layout."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.config import Config
from slime.types import RolloutBatch
from slime.weights.checksum import tensor_checksum
from slime.weights.endpoint import EngineEndpoint
from tests.support.engine_process import engine_process
from tests.support.gloo import Rank, run_ranks
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker, weights_of

pytestmark = pytest.mark.timeout(300)

PROMPTS = [list(range(40, 50)), list(range(60, 67))]
GROUP = 3


def post(url: str, route: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url + route, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def generate(url: str, rollout_id: int) -> tuple[RolloutBatch, set[str]]:
    """A rollout as the engine samples it, with its log-probs, and the weight versions it reports."""
    samples, versions = [], set()
    for group, prompt in enumerate(PROMPTS):
        for _ in range(GROUP):
            body = {
                "input_ids": prompt,
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True},
                "return_logprob": True,
            }
            meta = post(url, "/generate", body)["meta_info"]
            versions.add(str(meta["weight_version"]))
            samples.append((group, prompt, meta["output_token_logprobs"]))
    responses = [[int(entry[1]) for entry in found] for _, _, found in samples]
    count = len(samples)
    rewards = [float(i % GROUP) - 1 for i in range(count)]
    batch = RolloutBatch(
        rollout_id=rollout_id,
        tokens=[np.array([*p, *r], dtype=np.int32) for (_, p, _), r in zip(samples, responses, strict=True)],
        response_lengths=[len(r) for r in responses],
        loss_masks=[np.ones(len(r), dtype=np.float32) for r in responses],
        rewards=rewards,
        raw_rewards=rewards,
        truncated=[False] * count,
        sample_indices=list(range(count)),
        group_ids=[g for g, _, _ in samples],
        rollout_ids=list(range(count)),
        rollout_mask_sums=[float(len(r)) for r in responses],
        weight_versions=[("1",)] * count,
        rollout_log_probs=[np.array([entry[0] for entry in found], dtype=np.float32) for _, _, found in samples],
    )
    return batch, versions


def train_with_engine(rank: Rank, config: Config, url: str, ready: list[RolloutBatch]) -> Any:
    """Sync, train, sync; the given rollouts were sampled with the weights each step starts from."""
    with running_worker(config, rank) as worker:
        worker.connect_engines([EngineEndpoint(url=url, name="engine 0", backend="embedded")])
        worker.update_weights()
        metrics = [worker.train(batch) for batch in ready]
        sync = worker.update_weights()
        return metrics, sync, worker.weight_version, {k: tensor_checksum(v) for k, v in weights_of(worker).items()}


@pytest.mark.parametrize(
    ("family", "argv"),
    [
        ("qwen3", ()),
        ("qwen3", ("--tensor-model-parallel-size", "2")),
        ("qwen3", ("--pipeline-model-parallel-size", "2")),
        ("qwen3_moe", ("--expert-model-parallel-size", "2")),
        ("deepseek_v3", ("--expert-model-parallel-size", "2")),
    ],
    ids=["1", "tp2", "pp2", "qwen3_moe_ep2", "deepseek_v3_ep2"],
)
def test_log_probs_agree_and_weights_arrive(tmp_path: Path, family: Family, argv: tuple[str, ...]) -> None:
    model_dir = make_tiny_model(tmp_path / "model", family)
    processes = 2 if argv else 1
    # With this epsilon a gradient of nothing but rounding moves no weight, so that layouts train alike.
    schedule = ("--lr", "1e-2", "--lr-decay-style", "constant", "--adam-eps", "1e-3")
    data = {"global_batch_size": len(PROMPTS) * GROUP, "micro_batch_size": 4}
    weights = {"check_weight_update_equal": True}
    config = make_config(model_dir, (*schedule, *argv), num_processes=processes, data=data, weights=weights)
    with engine_process(model_dir) as url:
        batch, _ = generate(url, 0)
        metrics, sync, version, checksums = run_ranks(
            processes, train_with_engine, config, url, [batch], timeout_seconds=120
        )[0]
        held = post(url, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
        again, versions = generate(url, 1)
    assert metrics[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert metrics[0]["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    assert version == 2
    assert versions == {"2"}
    assert sync["perf/update_weights_time"] > 0
    assert sync["perf/update_weights_verified"] == len(checksums)
    assert sync["perf/update_weights_deferred"] == sync["perf/update_weights_unverified"] == 0
    assert held == checksums
    # The engine now samples from the trained weights: training the same first step again must agree with it.
    with running_worker(make_config(model_dir, schedule, data=data)) as worker:
        worker.train(batch)
        replayed = worker.train(again)
    assert replayed["train/train_rollout_logprob_abs_diff"] < 1e-3
