"""Numbers of an optimizer step that must hold: the invariants of ``--ci-test`` and recorded gradient norms.

Owns comparison and messages. Tests hold: each check passes and fails as stated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from slime.config import Config
from slime.errors import TrainerError

NEARLY_ZERO = 1e-6
GRAD_NORM_TOLERANCE = 0.01


def check_step(config: Config, metrics: Mapping[str, float], *, rollout_id: int, step_id: int) -> None:
    """Compare one optimizer step's metrics with what the flags demand.

    Args:
        config: The resolved configuration.
        metrics: ``train/*`` of the step, or a critic's ``critic-train/*``.
        rollout_id: Rollout being trained.
        step_id: Optimizer step within it.

    Raises:
        TrainerError: An invariant of ``--ci-test`` or a recorded gradient norm is violated.
    """
    if config.debug.ci_test and config.role == "actor" and rollout_id == 0 and step_id == 0:
        _check_first_step(config, metrics)
    prefix = "critic-train" if config.role == "critic" else "train"
    _check_grad_norm(config, metrics[f"{prefix}/grad_norm"], rollout_id, step_id)


def check_rollout(config: Config, metrics: Mapping[str, float], *, rollout_id: int) -> None:
    """Compare the means of the first rollout's columns with what ``--ci-test`` demands.

    Args:
        config: The resolved configuration.
        metrics: ``rollout/*``.
        rollout_id: Rollout that was trained.

    Raises:
        TrainerError: The reference is not the policy before its first update, or a mean is impossible.
    """
    if not config.debug.ci_test or rollout_id != 0:
        return
    log_probs, reference = metrics.get("rollout/log_probs"), metrics.get("rollout/ref_log_probs")
    replayed = config.algorithm.use_rollout_routing_replay  # the engine's routing is not the reference's
    # Without a pass of its own before the first step, the mean holds what later steps began with.
    moved = config.algorithm.use_rollout_logprobs and config.num_steps_per_rollout > 1
    compared = log_probs is not None and reference is not None and not (replayed or moved)
    if compared and not (config.debug.ci_disable_kl_checker or abs(log_probs - reference) <= NEARLY_ZERO):
        raise TrainerError(
            f"--ci-test: the policy's mean log-prob is {log_probs:.6g} and the reference's {reference:.6g} before "
            "the first update; they must be equal"
        )
    entropy = metrics.get("rollout/entropy")
    for name, wrong in (
        ("rollout/log_probs", log_probs is not None and not log_probs < 0),
        ("rollout/entropy", entropy is not None and not entropy > 0),
    ):
        if wrong:
            raise TrainerError(f"--ci-test: {name} is {metrics[name]:.6g} in the first rollout, which is impossible")


def _check_first_step(config: Config, metrics: Mapping[str, float]) -> None:
    limits = {"train/train_rollout_logprob_abs_diff": config.debug.ci_train_rollout_logprob_abs_diff_threshold}
    if not config.debug.ci_disable_kl_checker:
        if not config.algorithm.use_rollout_logprobs:  # else it is the distance to the engine
            limits["train/ppo_kl"] = NEARLY_ZERO
        # The reference routes by itself, so it may differ from the same weights under the engine's routes.
        if not config.algorithm.use_rollout_routing_replay:
            limits["train/kl_loss"] = NEARLY_ZERO
    for name, limit in limits.items():
        if not abs(metrics.get(name, 0.0)) <= limit:
            raise TrainerError(f"--ci-test: {name} is {metrics[name]:.4g} at the first step, allowed is {limit:g}")


def _check_grad_norm(config: Config, norm: float, rollout_id: int, step_id: int) -> None:
    def path(template: str) -> Path:
        return Path(template.format(role=config.role, rollout_id=rollout_id, step_id=step_id))

    if config.debug.ci_save_grad_norm:
        target = path(config.debug.ci_save_grad_norm)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(norm))
    if config.debug.ci_load_grad_norm:
        expected = float(json.loads(path(config.debug.ci_load_grad_norm).read_text()))
        if abs(norm - expected) > GRAD_NORM_TOLERANCE * abs(expected):
            raise TrainerError(
                f"rollout {rollout_id} step {step_id}: gradient norm {norm:.6g}, recorded was {expected:.6g}"
            )
