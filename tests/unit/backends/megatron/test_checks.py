"""``--ci-test`` passes what a healthy first rollout shows and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from slime.backends.megatron.checks import check_rollout, check_step
from slime.config import AlgorithmConfig, Config, DebugConfig
from slime.config.sections import DataConfig
from slime.errors import TrainerError

STEP = {
    "train/grad_norm": 1.0,
    "train/ppo_kl": 0.0,
    "train/kl_loss": 1e-9,
    "train/train_rollout_logprob_abs_diff": 0.02,
}
ROLLOUT = {"rollout/log_probs": -0.4, "rollout/ref_log_probs": -0.4, "rollout/entropy": 0.3}


def config(*, routing: bool = False, engine: bool = False, **debug: bool) -> Config:
    return Config(
        debug=DebugConfig(**({"ci_test": True} | debug)),
        algorithm=AlgorithmConfig(use_rollout_routing_replay=routing, use_rollout_logprobs=engine),
    )


def test_healthy_numbers_pass() -> None:
    check_step(config(), STEP, rollout_id=0, step_id=0)
    check_rollout(config(), ROLLOUT, rollout_id=0)
    check_rollout(config(), {}, rollout_id=0)


@pytest.mark.parametrize("name", ["train/ppo_kl", "train/kl_loss", "train/train_rollout_logprob_abs_diff"])
def test_each_number_of_the_first_step_is_held_to_its_limit(name: str) -> None:
    for value in (-0.2, math.nan):
        with pytest.raises(TrainerError, match=name):
            check_step(config(), STEP | {name: value}, rollout_id=0, step_id=0)
    check_step(config(), STEP | {name: -0.2}, rollout_id=0, step_id=1)
    check_step(config(ci_test=False), STEP | {name: -0.2}, rollout_id=0, step_id=0)
    if "kl" in name:
        check_step(config(ci_disable_kl_checker=True), STEP | {name: -0.2}, rollout_id=0, step_id=0)


def test_a_ratio_to_the_engine_is_held_to_the_limit_of_the_engine() -> None:
    check_step(config(engine=True), STEP | {"train/ppo_kl": -0.01}, rollout_id=0, step_id=0)
    with pytest.raises(TrainerError, match="logprob_abs_diff"):
        check_step(config(engine=True), STEP | {"train/train_rollout_logprob_abs_diff": 0.2}, rollout_id=0, step_id=0)


@pytest.mark.parametrize("difference", [1e-3, math.nan])
def test_the_reference_is_the_policy_before_the_first_update(difference: float) -> None:
    apart = ROLLOUT | {"rollout/ref_log_probs": -0.4 + difference}
    with pytest.raises(TrainerError, match="they must be equal"):
        check_rollout(config(), apart, rollout_id=0)
    check_rollout(config(), apart, rollout_id=1)
    check_rollout(config(ci_disable_kl_checker=True), apart, rollout_id=0)
    check_rollout(config(routing=True), apart, rollout_id=0)
    check_rollout(config(ci_test=False), apart, rollout_id=0)


def test_a_mean_over_later_steps_is_not_that_before_the_first() -> None:
    apart = ROLLOUT | {"rollout/ref_log_probs": -0.5}
    with pytest.raises(TrainerError, match="they must be equal"):
        check_rollout(config(engine=True), apart, rollout_id=0)
    check_rollout(replace(config(engine=True), data=DataConfig(num_steps_per_rollout=2)), apart, rollout_id=0)
    with pytest.raises(TrainerError, match="they must be equal"):
        check_rollout(replace(config(), data=DataConfig(num_steps_per_rollout=2)), apart, rollout_id=0)


@pytest.mark.parametrize(
    ("name", "value"), [("rollout/log_probs", 0.0), ("rollout/entropy", -0.1), ("rollout/entropy", math.nan)]
)
def test_impossible_means_are_refused(name: str, value: float) -> None:
    with pytest.raises(TrainerError, match=f"{name} is .* impossible"):
        check_rollout(config(ci_disable_kl_checker=True), ROLLOUT | {name: value}, rollout_id=0)
