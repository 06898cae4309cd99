"""Where a run starts, and which learning-rate schedule a continued run follows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import Config
from slime.errors import CheckpointError
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker, weights_of

pytestmark = pytest.mark.timeout(300)

COSINE = ("--lr", "1e-2", "--min-lr", "1e-3", "--lr-decay-style", "cosine", "--weight-decay", "0.1")
BATCHES = [make_rollout(seed=i, rollout_id=i) for i in range(4)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def config_for(model_dir: Path, argv: Sequence[str] = COSINE, *, num_rollout: int = 2, **checkpoint: Any) -> Config:
    """One optimizer step of 12 samples per rollout."""
    return make_config(
        model_dir,
        argv,
        data={
            "global_batch_size": 12,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 3,
            "micro_batch_size": 5,
            "num_rollout": num_rollout,
        },
        checkpoint={name: None if value is None else str(value) for name, value in checkpoint.items()},
    )


@pytest.fixture(scope="module")
def trained(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after 2 of 2 rollouts."""
    folder = tmp_path_factory.mktemp("trained")
    with running_worker(config_for(model_dir, save=folder)) as worker:
        for batch in BATCHES[:2]:
            worker.train(batch)
        worker.save(1)
    return folder


def rate_of_next_rollout(config: Config) -> float:
    """The learning rate of the first optimizer step after continuing."""
    with running_worker(config) as worker:
        assert worker.first_rollout_id == 2
        return worker.train(BATCHES[2])["train/lr-pg_0"]


def test_a_megatron_reference_gives_weights_and_nothing_else(model_dir: Path, trained: Path, tmp_path: Path) -> None:
    """Its iteration, optimizer and schedule belong to another run."""
    with running_worker(config_for(model_dir, load=trained)) as worker:
        assert worker.first_rollout_id == 2
        want = weights_of(worker)
    with running_worker(config_for(model_dir, load=tmp_path, save=tmp_path, ref_load=trained)) as worker:
        assert worker.first_rollout_id == 0
        got = weights_of(worker)
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        assert worker.train(BATCHES[0])["train/lr-pg_0"] == pytest.approx(1e-2)


def test_a_longer_run_continues_on_the_longer_schedule(
    model_dir: Path, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_worker(config_for(model_dir, num_rollout=8)) as worker:
        for batch in BATCHES[:2]:
            worker.train(batch)
        want = worker.train(BATCHES[2])["train/lr-pg_0"]
    with caplog.at_level(logging.WARNING):
        got = rate_of_next_rollout(config_for(model_dir, num_rollout=8, load=trained))
    assert got == want
    assert 1e-3 < got < 1e-2
    assert "lr_decay_steps is 96 samples from now on, it was 24" in caplog.text


def test_a_longer_run_with_a_warmup_share(model_dir: Path, tmp_path: Path) -> None:
    argv = (*COSINE, "--lr-warmup-fraction", "0.5")
    with running_worker(config_for(model_dir, argv, save=tmp_path)) as worker:
        for batch in BATCHES[:2]:
            worker.train(batch)
        worker.save(1)
    assert rate_of_next_rollout(config_for(model_dir, argv, num_rollout=8, load=tmp_path)) == pytest.approx(5e-3)


def test_another_rate_is_refused_unless_the_user_decides(model_dir: Path, trained: Path) -> None:
    other = ("--lr", "5e-2", *COSINE[2:])
    conflict = config_for(model_dir, other, num_rollout=8, load=trained)
    with (
        pytest.raises(
            CheckpointError, match=r"--lr: 0.05 given, 0.01 in the checkpoint.*--override-opt-param-scheduler"
        ),
        running_worker(conflict),
    ):
        pass
    overriding = config_for(model_dir, (*other, "--override-opt-param-scheduler"), num_rollout=8, load=trained)
    assert 1e-2 < rate_of_next_rollout(overriding) < 5e-2
    keeping = config_for(model_dir, (*other, "--use-checkpoint-opt-param-scheduler"), num_rollout=8, load=trained)
    assert rate_of_next_rollout(keeping) == pytest.approx(1e-3)  # the checkpoint's schedule is at its end
