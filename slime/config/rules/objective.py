"""Combinations of the objective's flags."""

from __future__ import annotations

from dataclasses import replace

from slime.config.draft import Draft
from slime.config.sections.algorithm import CRITIC_ESTIMATORS, WHITENED_ESTIMATORS


def check_objective(draft: Draft) -> None:
    """Check what excludes or needs what, and derive clip bounds."""
    algorithm = draft.algorithm
    if algorithm.eps_clip_high is None:
        algorithm = replace(algorithm, eps_clip_high=algorithm.eps_clip)
    if algorithm.use_rollout_routing_replay:
        algorithm = replace(algorithm, use_routing_replay=True)
    draft.algorithm = algorithm
    draft.problems += (
        _critic_problems(draft) + _kl_problems(draft) + _correction_problems(draft) + _hook_problems(draft)
    )
    if algorithm.tis_clip_low > algorithm.tis_clip:
        draft.problems.append(
            f"--tis-clip-low {algorithm.tis_clip_low:g} must not be larger than --tis-clip {algorithm.tis_clip:g}"
        )
    if draft.train.only_train_params_name_list and draft.train.freeze_params_name_list:
        draft.problems.append("--only-train-params-name-list and --freeze-params-name-list exclude each other")
    if draft.train.enable_mtp_training and not draft.train.mtp_num_layers:
        draft.problems.append("--enable-mtp-training needs --mtp-num-layers")
    if algorithm.advantage_estimator == "cispo" and algorithm.eps_clip < 1:
        draft.notices.append(
            f"--advantage-estimator cispo with --eps-clip {algorithm.eps_clip:g}: CISPO is meant to clip only from "
            "above; --eps-clip 1 or more turns the lower bound off"
        )


def _critic_problems(draft: Draft) -> list[str]:
    algorithm, rollouts = draft.algorithm, draft.data.num_rollout
    if algorithm.advantage_estimator not in CRITIC_ESTIMATORS:
        if algorithm.num_critic_only_steps:
            draft.notices.append(
                f"--num-critic-only-steps {algorithm.num_critic_only_steps} has no effect without "
                f"--advantage-estimator {', '.join(sorted(CRITIC_ESTIMATORS))}"
            )
        return []
    if rollouts is not None and 0 < rollouts <= algorithm.num_critic_only_steps:
        draft.notices.append(
            f"--num-critic-only-steps {algorithm.num_critic_only_steps}: all {rollouts} rollouts train only the critic"
        )
    if not algorithm.compute_advantages_and_returns:
        problem = (
            f"--advantage-estimator {algorithm.advantage_estimator} trains a critic on returns; remove "
            "--disable-compute-advantages-and-returns, or use an estimator without a critic"
        )
        return [problem]
    return []


def _kl_problems(draft: Draft) -> list[str]:
    algorithm = draft.algorithm
    problems: list[str] = []
    if algorithm.kl_coef != 0 and algorithm.kl_loss_coef != 0:
        problems.append(
            f"Only one of kl_coef and kl_loss_coef can be set; found --kl-coef {algorithm.kl_coef:g} and "
            f"--kl-loss-coef {algorithm.kl_loss_coef:g}"
        )
    if algorithm.kl_loss_coef != 0 and not algorithm.use_kl_loss:
        draft.notices.append(f"--kl-loss-coef {algorithm.kl_loss_coef:g} has no effect without --use-kl-loss")
    if algorithm.advantage_estimator in WHITENED_ESTIMATORS and not algorithm.normalize_advantages:
        problems.append(f"--advantage-estimator {algorithm.advantage_estimator} needs --normalize-advantages")
    if algorithm.ref_update_interval is not None and not (algorithm.use_kl_loss or algorithm.kl_coef != 0):
        draft.notices.append("--ref-update-interval has no effect: no reference is used")
    return problems


def _correction_problems(draft: Draft) -> list[str]:
    algorithm = draft.algorithm
    problems: list[str] = []
    if algorithm.use_rollout_logprobs and algorithm.use_tis:
        problems.append(
            "--use-rollout-logprobs and --use-tis exclude each other: the first takes the engine's log-probs as the "
            "old policy, so there is nothing left to correct"
        )
    if algorithm.get_mismatch_metrics and algorithm.custom_tis_function_path is None:
        problems.append("--get-mismatch-metrics needs --custom-tis-function-path")
    if algorithm.use_stateless_adam and not draft.checkpoint.no_save_optim:
        problems.append("--use-stateless-adam needs --no-save-optim")
    return problems


def _hook_problems(draft: Draft) -> list[str]:
    algorithm = draft.algorithm
    problems: list[str] = []
    if algorithm.loss_type == "custom_loss" and algorithm.custom_loss_function_path is None:
        problems.append("--loss-type custom_loss needs --custom-loss-function-path")
    if algorithm.custom_loss_function_path is not None and algorithm.loss_type != "custom_loss":
        problems.append(
            f"--custom-loss-function-path needs --loss-type custom_loss, found --loss-type {algorithm.loss_type}"
        )
    return problems
