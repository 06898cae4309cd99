"""A run that is interrupted has the losses of one that is not, also where training moves other weights than its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.types import RolloutBatch
from tests.support.gloo import Rank, run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker

pytestmark = pytest.mark.timeout(180)

SCHEDULE = ("--lr", "1e-2", "--lr-decay-style", "constant")
BATCHES = [make_rollout(seed=i, rollout_id=i) for i in range(6)]
MOVING = {
    "reference": {"algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}},
    "old_actor": {"rollout": {"keep_old_actor": True}},
    "both": {
        "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2},
        "rollout": {"keep_old_actor": True},
        "weights": {"update_weights_interval": 2},
    },
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


def config_for(
    model_dir: Path,
    folder: Path,
    kind: str,
    *,
    load: bool = False,
    argv: Sequence[str] = (),
    num_processes: int = 1,
    async_save: bool = False,
) -> Config:
    return make_config(
        model_dir,
        (*SCHEDULE, *argv),
        num_processes=num_processes,
        data={"global_batch_size": 12, "micro_batch_size": 5},
        checkpoint={"save": str(folder), "load": str(folder) if load else None, "async_save": async_save},
        **MOVING[kind],
    )


def sync(worker: Any, rollout_id: int) -> None:
    if (rollout_id + 1) % worker.config.weights.update_weights_interval == 0:
        worker.update_weights()


def run(worker: Any, batches: Sequence[RolloutBatch]) -> list[dict[str, float]]:
    """Train, and give the engines the weights where that is due."""
    rows = []
    for batch in batches:
        rows.append({k: v for k, v in worker.train(batch).items() if k.startswith("train/")})
        sync(worker, batch.rollout_id)
    return rows


def run_and_save(worker: Any, *, after_sync: bool = False) -> list[dict[str, float]]:
    """Save rollout 3 before its hand-over, as the loop does, or after it, as a run that is told to end may."""
    worker.update_weights()
    run(worker, BATCHES[:3])
    worker.train(BATCHES[3])
    if not after_sync:
        worker.save(3)
    sync(worker, 3)
    if after_sync:
        worker.save(3)
    return run(worker, BATCHES[4:])


@pytest.mark.parametrize("after_sync", [False, True], ids=["before-sync", "after-sync"])
@pytest.mark.parametrize(
    ("kind", "async_save"), [("reference", False), ("old_actor", False), ("both", False), ("both", True)]
)
def test_an_interrupted_run_continues_bit_for_bit(
    model_dir: Path, tmp_path: Path, kind: str, async_save: bool, after_sync: bool
) -> None:
    with running_worker(config_for(model_dir, tmp_path, kind, async_save=async_save)) as worker:
        want = run_and_save(worker, after_sync=after_sync)
        worker.finish_save()
    with running_worker(config_for(model_dir, tmp_path, kind, load=True)) as worker:
        worker.update_weights()
        got = run(worker, BATCHES[4:])
    key = {"reference": "train/kl_loss", "old_actor": "train/ppo_kl", "both": "train/kl_loss"}[kind]
    assert abs(want[1][key]) > 1e-5  # the other weights are not those that are trained
    assert got == want


def resumed(rank: Rank, config: Config) -> list[dict[str, float]]:
    with running_worker(config, rank) as worker:
        worker.update_weights()
        return run(worker, BATCHES[4:])


def test_another_layout_continues_with_the_same_losses(model_dir: Path, tmp_path: Path) -> None:
    kind = "both"
    base = config_for(model_dir, tmp_path, kind)
    with running_worker(replace(base, weights=replace(base.weights, update_weights_interval=1))) as worker:
        want = run_and_save(worker)
    argv = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2")
    layout = config_for(model_dir, tmp_path, kind, load=True, argv=argv, num_processes=4)
    layout = replace(layout, weights=replace(layout.weights, update_weights_interval=1))
    for rows in run_ranks(4, resumed, layout, timeout_seconds=120):
        for mine, theirs in zip(rows, want, strict=True):
            for name in ("train/loss", "train/kl_loss", "train/ppo_kl", "train/entropy_loss"):
                assert mine[name] == pytest.approx(theirs[name], abs=2e-5), name


def test_a_checkpoint_without_them_starts_them_anew_and_says_so(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(model_dir, tmp_path, "reference")
    fixed = replace(config, algorithm=replace(config.algorithm, ref_update_interval=None))
    with running_worker(fixed) as worker:
        run(worker, BATCHES[:1])
        worker.save(0)
        want = run(worker, BATCHES[1:2])
    with (
        caplog.at_level(logging.WARNING),
        running_worker(config_for(model_dir, tmp_path, "reference", load=True)) as worker,
    ):
        assert run(worker, BATCHES[1:2]) == want
    assert "saved without the reference of --ref-update-interval" in caplog.text
