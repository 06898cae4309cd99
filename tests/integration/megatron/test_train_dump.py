"""The dump of a training batch: every sample once with what the loss saw, whatever the layout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.config import Config
from slime.errors import TrainerError
from tests.support.gloo import Rank, run_ranks
from tests.support.rollouts import make_rollout, rollout_mean
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import LINEAR_ADAM, running_worker

pytestmark = pytest.mark.timeout(180)

BATCH = replace(make_rollout(), rollout_id=3)
COLUMNS = {
    "current_log_probs",
    "log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "advantages",
    "returns",
    "loss_masks",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def config_for(model_dir: Path, folder: Path, num_processes: int = 1, **sections: Any) -> Config:
    return make_config(
        model_dir,
        LINEAR_ADAM,
        num_processes=num_processes,
        data={"global_batch_size": 6, "micro_batch_size": 2},
        algorithm={"use_kl_loss": True},
        debug={"save_debug_train_data": str(folder / "{rollout_id}.pt")},
        **sections,
    )


def train(rank: Rank, config: Config) -> list[dict[str, float]]:
    with running_worker(config, rank) as worker:
        worker.train(BATCH)
        return worker.step_metrics


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "3.pt", weights_only=False)


def test_one_dump_per_rollout_with_the_columns_of_the_loss(model_dir: Path, tmp_path: Path) -> None:
    config = config_for(model_dir, tmp_path)
    with running_worker(config) as worker:
        worker.train(BATCH)
        steps = worker.step_metrics
    dump = load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["3.pt"]
    assert (dump["format_version"], dump["rollout_id"], dump["rank"]) == (2, 3, 0)
    assert dump["raw_reward"] == BATCH.raw_rewards
    rows = dump["samples"]
    assert [row["rollout_position"] for row in rows] == list(range(len(BATCH)))
    for i, row in enumerate(rows):
        assert row.keys() >= COLUMNS
        assert row["sample_index"] == BATCH.sample_indices[i]
        assert row["tokens"].tolist() == BATCH.tokens[i].tolist()
        assert np.array_equal(row["loss_masks"].numpy(), BATCH.loss_masks[i])
        assert all(row[name].shape == (BATCH.response_lengths[i],) for name in COLUMNS)
        assert all(value.device.type == "cpu" for value in row.values() if isinstance(value, torch.Tensor))
    # The clipped objective, written out from the dump alone, is the loss that was logged for each step.
    (shard,) = dump["dp_shards"]
    assert shard["global_batch_sizes"] == [6, 6]
    high, low = 1 + config.algorithm.eps_clip, 1 - config.algorithm.eps_clip
    for micro_batches, metrics in zip(shard["micro_batch_indices"], steps, strict=True):
        samples = [shard["partition"][place] for micro_batch in micro_batches for place in micro_batch]
        losses = []
        for row in rows:
            ratio = (row["current_log_probs"].double() - row["log_probs"].double()).exp()
            gain = torch.minimum(ratio * row["advantages"], ratio.clamp(low, high) * row["advantages"])
            losses.append(-gain)
        assert float(rollout_mean(BATCH, losses, samples)) == pytest.approx(metrics["train/pg_loss"], abs=1e-6)
        assert abs(metrics["train/pg_loss"]) > 1e-4


def test_layouts_differ_only_in_who_trained_what(model_dir: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with running_worker(config_for(model_dir, one)) as worker:
        worker.train(BATCH)
    run_ranks(2, train, config_for(model_dir, two, 2), timeout_seconds=90)
    want, got = load(one), load(two)
    assert [shard["dp_rank"] for shard in got["dp_shards"]] == [0, 1]
    held = [sample for shard in got["dp_shards"] for sample in shard["partition"]]
    assert sorted(held) == list(range(len(BATCH)))
    for mine, theirs in zip(got["samples"], want["samples"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in COLUMNS:
            assert torch.allclose(mine[name], theirs[name], atol=1e-5), name


def test_what_ended_a_run_is_dumped(model_dir: Path, tmp_path: Path) -> None:
    config = config_for(model_dir, tmp_path, train={"max_skipped_steps": 1})
    poisoned = replace(BATCH, rewards=[math.nan, *BATCH.rewards[1:]])
    with running_worker(config) as worker, pytest.raises(TrainerError, match="--save-debug-train-data"):
        worker.train(poisoned)
    row = load(tmp_path)["samples"][0]
    assert math.isnan(row["rewards"])
    assert "current_log_probs" not in row
