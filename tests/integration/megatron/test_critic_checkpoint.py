"""Checkpoints of the critic: exact continuation, and a start from a policy's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config, make_critic_config
from tests.support.workers import running_worker, weights_of

pytestmark = pytest.mark.timeout(180)

ARGV = ("--lr", "1e-2", "--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--weight-decay", "0.1")
BATCHES = [make_rollout(seed=i, rollout_id=i) for i in range(4)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


def sections(save: Path, load: Path | None = None, **checkpoint: Any) -> dict[str, Any]:
    return {
        "data": {"global_batch_size": 6, "micro_batch_size": 5},
        "checkpoint": {"save": str(save), "load": None if load is None else str(load)} | checkpoint,
    }


def losses(worker: Any, first: int, last: int) -> list[dict[str, float]]:
    """Every number but durations of rollouts ``first`` to ``last``."""
    rows = []
    for batch in BATCHES[first:last]:
        values = worker.score(batch)
        returns = {i: np.full_like(row, batch.rewards[i]) for i, row in values.items()}
        rows.append(worker.train(batch, values, returns))
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


def test_continuation_is_bit_exact(model_dir: Path, tmp_path: Path) -> None:
    config = make_critic_config(model_dir, ARGV, **sections(tmp_path))
    with running_worker(config) as worker:
        losses(worker, 0, 2)
        worker.save(1)
        want, want_weights = losses(worker, 2, 4), weights_of(worker)
    assert config.checkpoint.save == str(tmp_path / "critic")
    # Where the actor continues iteration 1, which alone it knows of.
    checkpoint = replace(
        config.checkpoint, load=config.checkpoint.save, ckpt_step=1, resume=True, start_rollout_id=None
    )
    with running_worker(replace(config, checkpoint=checkpoint)) as worker:
        assert worker.first_rollout_id == 2
        assert losses(worker, 2, 4) == want
        got = weights_of(worker)
    assert all(torch.equal(got[name], tensor) for name, tensor in want_weights.items())


def test_a_policys_megatron_checkpoint_gives_the_trunk_only(model_dir: Path, tmp_path: Path) -> None:
    with running_worker(make_config(model_dir, ARGV, **sections(tmp_path))) as worker:
        worker.train(BATCHES[0])
        worker.save(0)
        policy = weights_of(worker)
    with running_worker(make_critic_config(model_dir, ARGV, **sections(tmp_path / "new"))) as worker:
        fresh = weights_of(worker)
    config = make_critic_config(model_dir, (*ARGV, "--finetune"), **sections(tmp_path / "new", tmp_path))
    with running_worker(config) as worker:
        assert worker.first_rollout_id == 0
        got = weights_of(worker)
        # The fp32 master weights have to be the loaded ones too.
        losses(worker, 0, 1)
        moved = max((weights_of(worker)[name] - tensor).abs().max().item() for name, tensor in got.items())
    head = {"score.weight", "score.bias"}
    assert got.keys() == policy.keys() | head
    assert all(torch.equal(got[name], tensor) for name, tensor in policy.items())
    assert not torch.equal(policy["model.norm.weight"], fresh["model.norm.weight"])
    assert all(torch.equal(got[name], fresh[name]) for name in head)
    assert 0 < moved < 0.05
