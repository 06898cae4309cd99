"""Tensor, data, context and pipeline parallel training against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo import run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.workers import LINEAR_ADAM, Case, Outcome, assert_same_training, free_ports, run_case, run_cases

pytestmark = pytest.mark.timeout(400)

BATCH = make_rollout()
DATA = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60, "global_batch_size": 6}
POLICY = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01, "use_tis": True}
WHITENED = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.01}
TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
CP = ("--context-parallel-size", "2")


def case(
    layout: tuple[str, ...] = (),
    *,
    algorithm: dict[str, Any] = POLICY,
    data: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    num_processes: int = 2,
) -> Case:
    return Case(
        argv=(*LINEAR_ADAM, *layout),
        sections={"algorithm": algorithm, "data": DATA | (data or {}), "train": train or {}},
        batches=[BATCH, replace(BATCH, rollout_id=1)],
        num_processes=num_processes,
    )


PER_TOKEN = POLICY | {"calculate_per_token_loss": True}
CORRECTED = {
    "use_tis": True,
    "tis_level": "sequence",
    "tis_clip": 0.5,
    "tis_batch_normalize": True,
    "use_rs": True,
    "rs_level": "geometric",
    "rs_lower_bound": 0.05,
    "rs_upper_bound": 0.12,
    "constant_loss_denominator": 8,
}
GSPO = {"advantage_estimator": "gspo", "use_opsm": True}
CASES: dict[str, Case] = {
    "tp2": case(TP),
    "tp2_sp": case((*TP, "--sequence-parallel")),
    "tp2_recomputed_loss": case(TP, train={"recompute_loss_function": True}),
    "dp2": case(),
    "dp2_balanced": case(data={"balance_data": True}, algorithm=CORRECTED),
    "dp2_per_token": case(algorithm=PER_TOKEN),
    "dp2_whitened": case(algorithm=WHITENED),
    # One sample per micro-batch and five-sample steps: a rank gets a placeholder.
    "dp2_uneven": case(data={"use_dynamic_batch_size": False, "global_batch_size": 12}),
    "cp2": case(CP),
    "cp2_shared_prompts": case(CP, algorithm=CORRECTED, train={"share_prompt_prefix": True}),
    "cp2_per_token_gspo": case(CP, algorithm=GSPO | {"calculate_per_token_loss": True}),
    "pp2": case(PP),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def outcomes(model_dir: Path) -> dict[str, Outcome]:
    return run_ranks(2, run_cases, model_dir, CASES, free_ports(len(CASES)), timeout_seconds=360)[0]


def single(model_dir: Path, name: str) -> Outcome:
    return run_case(model_dir, replace(CASES[name], argv=LINEAR_ADAM, num_processes=1))


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, model_dir: Path, outcomes: dict[str, Outcome]) -> None:
    assert_same_training(outcomes[name], single(model_dir, name))
