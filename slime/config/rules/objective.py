"""Combinations of the objective's flags."""

from __future__ import annotations

from dataclasses import replace

from slime.config.draft import Draft
from slime.config.sections.algorithm import CRITIC_ESTIMATORS, KL_PENALTY_ESTIMATORS, WHITENED_ESTIMATORS


def check_objective(draft: Draft) -> None:
    """Check what excludes or needs what, and derive clip bounds."""
    algorithm = draft.algorithm
    if algorithm.eps_clip_high is None:
        algorithm = replace(algorithm, eps_clip_high=algorithm.eps_clip)
    if algorithm.use_rollout_routing_replay:
        algorithm = replace(algorithm, use_routing_replay=True)
    draft.algorithm = algorithm
    draft.problems += _critic_problems(draft) + _kl_problems(draft) + _weight_problems(draft)
    draft.problems += _other_problems(draft) + _hook_problems(draft)
    _check_routing_replay(draft)
    if draft.train.only_train_params_name_list and draft.train.freeze_params_name_list:
        draft.problems.append("--only-train-params-name-list and --freeze-params-name-list exclude each other")
    if draft.train.enable_mtp_training and not draft.train.mtp_num_layers:
        draft.problems.append("--enable-mtp-training needs --mtp-num-layers")
    if algorithm.advantage_estimator == "cispo" and algorithm.eps_clip_c is not None:
        draft.notices.append("--eps-clip-c has no effect with --advantage-estimator cispo: there is no dual clip in it")
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
        supervised = algorithm.loss_type == "sft_loss"
        found = "--loss-type sft_loss" if supervised else "--disable-compute-advantages-and-returns"
        problem = (
            f"--advantage-estimator {algorithm.advantage_estimator} trains a critic on returns; remove "
            f"{found}, or use an estimator without a critic"
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
    if algorithm.kl_coef != 0 and algorithm.advantage_estimator not in KL_PENALTY_ESTIMATORS:
        draft.notices.append(
            f"--kl-coef {algorithm.kl_coef:g} does not enter the advantages of --advantage-estimator "
            f"{algorithm.advantage_estimator}; use --use-kl-loss and --kl-loss-coef"
        )
    if algorithm.advantage_estimator in WHITENED_ESTIMATORS and not algorithm.normalize_advantages:
        problems.append(f"--advantage-estimator {algorithm.advantage_estimator} needs --normalize-advantages")
    if algorithm.ref_update_interval is not None and not (algorithm.use_kl_loss or algorithm.kl_coef != 0):
        draft.notices.append("--ref-update-interval has no effect: no reference is used")
    return problems


def _weight_problems(draft: Draft) -> list[str]:
    """How rollouts and tokens are compared and weighed."""
    algorithm, data, reward = draft.algorithm, draft.data, draft.reward
    problems: list[str] = []
    own_rewards = reward.custom_reward_post_process_path is not None or not algorithm.rewards_normalization
    if algorithm.advantage_estimator == "rloo" and data.n_samples_per_prompt == 1 and not own_rewards:
        problems.append(
            "--advantage-estimator rloo compares a rollout with the others of its prompt, and --n-samples-per-prompt "
            "is 1; use 2 or more"
        )
    if algorithm.constant_loss_denominator is not None and algorithm.calculate_per_token_loss:
        problems.append("--constant-loss-denominator and --calculate-per-token-loss exclude each other")
    buffer, longest = reward.overlong_buffer_len, draft.rollout.rollout_max_response_len
    if buffer is None:
        if reward.overlong_penalty_factor != 1.0:
            draft.notices.append("--overlong-penalty-factor has no effect without --overlong-buffer-len")
        return problems
    if longest is not None and buffer > longest:
        problems.append(
            f"--overlong-buffer-len {buffer} must be at most --rollout-max-response-len, which is {longest}"
        )
    for flag, path in (
        ("--custom-reward-post-process-path", reward.custom_reward_post_process_path),
        ("--custom-convert-samples-to-train-data-path", reward.custom_convert_samples_to_train_data_path),
    ):
        if path is not None:
            problems.append(f"--overlong-buffer-len and {flag} exclude each other: the function makes the rewards")
    return problems


def _other_problems(draft: Draft) -> list[str]:
    algorithm = draft.algorithm
    problems: list[str] = []
    if algorithm.use_stateless_adam and not draft.checkpoint.no_save_optim:
        problems.append("--use-stateless-adam needs --no-save-optim")
    return problems


def _check_routing_replay(draft: Draft) -> None:
    algorithm = draft.algorithm
    if not algorithm.use_routing_replay or algorithm.use_rollout_routing_replay:
        return
    if not algorithm.compute_advantages_and_returns:
        draft.problems.append(
            "--use-routing-replay replays the routing of the log-prob pass, which "
            "--disable-compute-advantages-and-returns leaves out; --use-rollout-routing-replay needs no such pass"
        )
    if algorithm.use_rollout_logprobs:
        draft.notices.append(
            "--use-routing-replay runs the log-prob pass for its routing only: --use-rollout-logprobs takes the old "
            "log-probs from the engine"
        )


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
