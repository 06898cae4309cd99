"""Checkpoints: exact continuation, other layouts, killed saves, where a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import Config
from slime.errors import CheckpointError
from slime.types import RolloutBatch
from tests.support.gloo import Rank, run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import free_ports, running_worker, weights_of

pytestmark = pytest.mark.timeout(300)

ARGV = ("--lr", "1e-2", "--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--weight-decay", "0.1")
BATCHES = [make_rollout(seed=i, rollout_id=i) for i in range(4)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def config_for(
    model_dir: Path,
    save: Path,
    *,
    load: Path | None = None,
    argv: Sequence[str] = (),
    num_processes: int = 1,
    precision: str = "fp32",
    **checkpoint: Any,
) -> Config:
    return make_config(
        model_dir,
        (*ARGV, *argv),
        num_processes=num_processes,
        data={"global_batch_size": 6, "micro_batch_size": 5},
        train={"precision": precision},
        checkpoint={"save": str(save), "load": None if load is None else str(load)} | checkpoint,
    )


def losses(worker: Any, batches: Sequence[RolloutBatch]) -> list[dict[str, float]]:
    """Every training number but durations."""
    rows = [worker.train(batch) for batch in batches]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


@pytest.mark.parametrize(
    ("precision", "argv"),
    # With dropout the losses show that the random state continues as well.
    [("fp32", ()), ("bf16", ()), ("fp32", ("--hidden-dropout", "0.1"))],
    ids=["fp32", "bf16", "dropout"],
)
def test_continuation_is_bit_exact(model_dir: Path, tmp_path: Path, precision: str, argv: tuple[str, ...]) -> None:
    with running_worker(config_for(model_dir, tmp_path, precision=precision, argv=argv)) as worker:
        assert worker.first_rollout_id == 0
        losses(worker, BATCHES[:2])
        worker.save(1)
        want, want_weights = losses(worker, BATCHES[2:]), weights_of(worker)
    with running_worker(config_for(model_dir, tmp_path, load=tmp_path, precision=precision, argv=argv)) as worker:
        assert worker.first_rollout_id == 2
        assert losses(worker, BATCHES[2:]) == want
        got = weights_of(worker)
    assert all(torch.equal(got[name], tensor) for name, tensor in want_weights.items())


def test_without_the_random_state_dropout_is_another(model_dir: Path, tmp_path: Path) -> None:
    dropout = ("--hidden-dropout", "0.1")
    with running_worker(config_for(model_dir, tmp_path, argv=dropout)) as worker:
        losses(worker, BATCHES[:1])
        worker.save(0)
        want = losses(worker, BATCHES[1:2])
    argv = (*dropout, "--no-load-rng")
    with running_worker(config_for(model_dir, tmp_path, load=tmp_path, argv=argv)) as worker:
        assert losses(worker, BATCHES[1:2]) != want


def test_saving_before_the_first_step_changes_nothing(model_dir: Path, tmp_path: Path) -> None:
    with running_worker(config_for(model_dir, tmp_path)) as worker:
        want = losses(worker, BATCHES[:2])
    with running_worker(config_for(model_dir, tmp_path)) as worker:
        worker.save(0)
        assert losses(worker, BATCHES[:2]) == want
    with running_worker(config_for(model_dir, tmp_path, load=tmp_path)) as worker:
        assert losses(worker, BATCHES[:2]) == want


def test_the_resolved_configuration_lies_beside_the_weights(model_dir: Path, tmp_path: Path) -> None:
    config = config_for(model_dir, tmp_path)
    with running_worker(config) as worker:
        worker.save(0)
    text = (tmp_path / "iter_0000000" / "slime_config.json").read_text()
    assert Config.from_json(text) == config


def train_and_save(rank: Rank, config: Config, batches: Sequence[RolloutBatch], save_as: int | None) -> Any:
    with running_worker(config, rank) as worker:
        rows = losses(worker, batches)
        if save_as is not None:
            worker.save(save_as)
        return worker.first_rollout_id, rows


def in_one_session(
    rank: Rank, runs: Sequence[tuple[Config, Sequence[RolloutBatch], int | None]], ports: list[int]
) -> Any:
    places = [Rank(rank.rank, rank.world_size, port) for port in ports]
    return [train_and_save(place, *run) for place, run in zip(places, runs, strict=True)]


def test_other_layouts_continue_with_the_same_losses(model_dir: Path, tmp_path: Path) -> None:
    from_one = tmp_path / "one"
    with running_worker(config_for(model_dir, from_one)) as worker:
        losses(worker, BATCHES[:1])
        worker.save(0)
        want = losses(worker, BATCHES[1:3])
    layouts = {"tp2": ("--tensor-model-parallel-size", "2"), "dp2": (), "pp2": ("--pipeline-model-parallel-size", "2")}
    runs = [
        (config_for(model_dir, tmp_path / name, load=from_one, argv=argv, num_processes=2), BATCHES[1:2], 1)
        for name, argv in layouts.items()
    ]
    results = run_ranks(2, in_one_session, runs, free_ports(len(runs)), timeout_seconds=120)[0]
    for name, (start, rows) in zip(layouts, results, strict=True):
        assert start == 1
        with running_worker(config_for(model_dir, from_one, load=tmp_path / name)) as worker:
            assert worker.first_rollout_id == 2
            back = losses(worker, BATCHES[2:3])
        for mine, theirs in zip([*rows, *back], want, strict=True):
            assert mine["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5), name
            assert mine["train/entropy_loss"] == pytest.approx(theirs["train/entropy_loss"], abs=1e-4), name
            assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4), name
            assert mine["train/lr-pg_0"] == theirs["train/lr-pg_0"], name


def test_old_checkpoints_go_and_leftovers_with_them(model_dir: Path, tmp_path: Path) -> None:
    with running_worker(config_for(model_dir, tmp_path, keep_checkpoints=2)) as worker:
        for rollout_id in range(3):
            worker.save(rollout_id)
        killed = tmp_path / ".iter_0000003.saving"
        killed.mkdir()
        (killed / "half").write_text("")
        worker.save(4)
        worker.save(4)  # replacing one's own checkpoint is allowed
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_weights_only_and_no_save_optim(model_dir: Path, tmp_path: Path) -> None:
    with running_worker(config_for(model_dir, tmp_path, no_save_optim=True)) as worker:
        losses(worker, BATCHES[:1])
        worker.save(0)
        want = weights_of(worker)
    with (
        pytest.raises(CheckpointError, match="--no-load-optim"),
        running_worker(config_for(model_dir, tmp_path, load=tmp_path)),
    ):
        pass
    for argv, first in ((("--no-load-optim",), 1), (("--finetune",), 0)):
        with running_worker(config_for(model_dir, tmp_path, load=tmp_path, argv=argv)) as worker:
            assert worker.first_rollout_id == first
            got = weights_of(worker)
            assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
            # The fp32 master weights have to be the loaded ones too.
            losses(worker, BATCHES[:1])
            moved = max((weights_of(worker)[name] - tensor).abs().max().item() for name, tensor in want.items())
            assert moved < 0.05


def test_reference_stays_when_the_actor_resumes(model_dir: Path, tmp_path: Path) -> None:
    base = config_for(model_dir, tmp_path)
    config = replace(base, algorithm=replace(base.algorithm, use_kl_loss=True, kl_loss_coef=0.1))
    with running_worker(config) as worker:
        losses(worker, BATCHES[:1])
        worker.save(0)
        want = losses(worker, BATCHES[1:2])
    resumed = replace(config, checkpoint=config_for(model_dir, tmp_path, load=tmp_path).checkpoint)
    with running_worker(resumed) as worker:
        assert losses(worker, BATCHES[1:2]) == want
    assert abs(want[0]["train/kl_loss"]) > 1e-5
