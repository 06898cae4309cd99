"""On-policy distillation under parallel layouts, its teacher in the trainer, against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parallel.layouts import layout
from tests.support.gloo import run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.workers import LINEAR_ADAM, Case, Outcome, assert_same_training, free_ports, run_case, run_cases

pytestmark = pytest.mark.timeout(400)

NAMES = ("tp2_sp_pp2", "cp2_dp2")
BATCH = make_rollout()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    teacher = make_tiny_model(tmp_path_factory.mktemp("teacher"), "llama", seed=5)
    distil = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(teacher), "opd_kl_coef": 0.3}
    sections = {
        "algorithm": {**distil, "advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
        "data": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60, "global_batch_size": 6},
        "train": {"recompute_loss_function": True, "log_probs_chunk_size": 8},
    }
    batches = [BATCH, replace(BATCH, rollout_id=1)]
    return {
        name: Case(
            argv=(*LINEAR_ADAM, *layout(name).argv),
            sections=sections,
            batches=batches,
            num_processes=layout(name).world_size,
        )
        for name in (*NAMES, "one")
    }


@pytest.fixture(scope="module")
def outcomes(model_dir: Path, cases: dict[str, Case]) -> dict[str, Outcome]:
    chosen = {name: cases[name] for name in NAMES}
    return run_ranks(4, run_cases, model_dir, chosen, free_ports(len(chosen)), timeout_seconds=360)[0]


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(name: str, model_dir: Path, cases: dict[str, Case], outcomes: dict[str, Outcome]) -> None:
    want = run_case(model_dir, cases["one"])
    assert abs(want.metrics[0]["train/opd_reverse_kl"]) > 0.1
    assert_same_training(outcomes[name], want)
