"""What must not be trained on is not, and is counted; checks stop a run as stated."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.backends.megatron.snapshots import WeightSnapshot
from slime.config import Config
from slime.errors import ConfigError, DataError, TrainerError
from slime.types import RolloutBatch
from tests.support.gloo import Rank, run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import LINEAR_ADAM, Case, run_case, running_worker, weights_of

pytestmark = pytest.mark.timeout(180)

BATCH = make_rollout()
DATA = {"global_batch_size": 12, "micro_batch_size": 5}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def run(model_dir: Path, batch: Any = BATCH, **sections: dict[str, Any]) -> dict[str, float]:
    return run_case(model_dir, Case(sections={"data": DATA} | sections, batches=[batch])).metrics[0]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_that_is_not_finite_is_skipped_and_counted(model_dir: Path, poison: float, precision: str) -> None:
    config = make_config(model_dir, LINEAR_ADAM, data=DATA, train={"precision": precision})
    bad = replace(BATCH, rewards=[poison, poison, *BATCH.rewards[2:]])
    with running_worker(config) as worker:
        before = weights_of(worker)
        metrics = worker.train(bad)
        after = weights_of(worker)
        assert metrics["train/skipped_steps_count"] == 1
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        good = worker.train(replace(BATCH, rollout_id=1))
    with running_worker(config) as worker:
        want = worker.train(replace(BATCH, rollout_id=1))
    assert good["train/skipped_steps_count"] == 0
    for name in ("train/loss", "train/grad_norm"):
        assert good[name] == want[name]


def test_gradients_that_are_not_finite_are_named_and_end_the_run_when_they_go_on(model_dir: Path) -> None:
    config = make_config(model_dir, LINEAR_ADAM, data=DATA, train={"max_skipped_steps": 2})
    with running_worker(config) as worker:
        before = weights_of(worker)
        name, parameter = next(p for p in worker.chunks[0].named_parameters() if "linear_fc2" in p[0])
        hook = parameter.register_hook(lambda gradient: gradient * math.nan)
        assert worker.train(BATCH)["train/skipped_steps_count"] == 1
        hook.remove()
        assert worker.train(replace(BATCH, rollout_id=1))["train/skipped_steps_count"] == 0
        after = weights_of(worker)
        assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
        parameter.register_hook(lambda gradient: gradient * math.nan)
        worker.train(replace(BATCH, rollout_id=2))
        with pytest.raises(TrainerError) as stop:
            worker.train(replace(BATCH, rollout_id=3))
        assert "2 updates in a row were skipped, the last at rollout 3 step 0" in str(stop.value)
        assert f"the loss is finite and the gradient norm is nan (first in {name.removeprefix('module.')})" in str(
            stop.value
        )
        assert all(torch.equal(tensor, after[name]) for name, tensor in weights_of(worker).items())


def train_with_one_poisoned_sample(rank: Rank, config: Config, bad: RolloutBatch) -> Any:
    """Outcomes of a bad rollout, a good one, and of bad ones until the run ends."""
    with running_worker(config, rank) as worker:
        skipped = [worker.train(batch)["train/skipped_steps_count"] for batch in (bad, replace(BATCH, rollout_id=1))]
        worker.train(replace(bad, rollout_id=2))
        with pytest.raises(TrainerError) as stop:
            worker.train(replace(bad, rollout_id=3))
        return skipped, str(stop.value)


def test_poison_in_one_rank_stops_all_ranks_at_the_same_step(model_dir: Path) -> None:
    """One sample of one data-parallel rank; the others must neither update nor wait."""
    config = make_config(model_dir, LINEAR_ADAM, num_processes=2, data=DATA, train={"max_skipped_steps": 2})
    rewards = [math.nan if i == len(BATCH) - 1 else reward for i, reward in enumerate(BATCH.rewards)]
    first, second = run_ranks(
        2, train_with_one_poisoned_sample, config, replace(BATCH, rewards=rewards), timeout_seconds=90
    )
    assert first == second
    assert first[0] == [1, 0]
    assert "2 updates in a row were skipped, the last at rollout 3 step 0: the loss is not finite" in first[1]


def test_poison_behind_the_mask_does_not_matter(model_dir: Path) -> None:
    assert BATCH.rollout_log_probs is not None
    rows = [
        np.where(m > 0, p, np.nan).astype(np.float32)
        for p, m in zip(BATCH.rollout_log_probs, BATCH.loss_masks, strict=True)
    ]
    algorithm = {"use_tis": True}
    got = run(model_dir, replace(BATCH, rollout_log_probs=rows), algorithm=algorithm)
    want = run(model_dir, algorithm=algorithm)
    for name in want:
        if name.startswith(("train/", "rollout/")):
            assert got[name] == want[name], name


def test_a_fully_masked_sample_is_harmless(model_dir: Path) -> None:
    masks = [m * (i != 4) for i, m in enumerate(BATCH.loss_masks)]
    sums = [0.0 if i == 4 else s for i, s in enumerate(BATCH.rollout_mask_sums)]
    metrics = run(model_dir, replace(BATCH, loss_masks=masks, rollout_mask_sums=sums))
    assert math.isfinite(metrics["train/loss"])
    assert metrics["train/grad_norm"] > 0


def test_ci_checks(model_dir: Path, tmp_path: Path) -> None:
    loose = {"ci_test": True, "ci_train_rollout_logprob_abs_diff_threshold": 100.0}
    norms = str(tmp_path / "{role}-{rollout_id}-{step_id}.json")
    run(model_dir, debug=loose | {"ci_save_grad_norm": norms})
    assert (tmp_path / "actor-0-0.json").exists()
    run(model_dir, debug=loose | {"ci_load_grad_norm": norms})
    with pytest.raises(TrainerError, match="gradient norm"):
        run(model_dir, debug=loose | {"ci_load_grad_norm": norms}, algorithm={"entropy_coef": 1.0})
    with pytest.raises(TrainerError, match="train_rollout_logprob_abs_diff"):
        run(model_dir, debug={"ci_test": True})


def test_missing_data_names_the_flag(model_dir: Path) -> None:
    with pytest.raises(DataError, match="--use-tis"):
        run(model_dir, replace(BATCH, rollout_log_probs=None), algorithm={"use_tis": True})
    with pytest.raises(ConfigError, match="--global-batch-size 99"):
        run(model_dir, data={"global_batch_size": 99})


def test_lent_weights_come_back(model_dir: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", "llama", seed=9)
    config = make_config(model_dir, data=DATA)
    with running_worker(make_config(other, data=DATA)) as worker:
        foreign, want = WeightSnapshot(worker.chunks), weights_of(worker)
    with running_worker(config) as worker:
        before = weights_of(worker)
        with foreign.lent_to(worker.chunks):
            lent = weights_of(worker)
        after = weights_of(worker)
    assert all(torch.equal(lent[name], want[name]) for name in want)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_reference_update_interval(model_dir: Path) -> None:
    sections = {
        "algorithm": {"use_kl_loss": True, "ref_update_interval": 2},
        "data": DATA,
    }
    batches = [replace(BATCH, rollout_id=i) for i in range(4)]
    kls = [
        m["train/kl_loss"]
        for m in run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=batches)).metrics
    ]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert abs(kls[1]) > 1e-5
    assert kls[2] == pytest.approx(0, abs=1e-6)
    assert abs(kls[3]) > 1e-5
