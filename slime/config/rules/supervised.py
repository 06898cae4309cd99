"""Supervised fine-tuning: a loss without rewards, on samples that nobody generates."""

from __future__ import annotations

from dataclasses import replace

from slime.config.draft import Draft

SUPERVISED_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"


def resolve_supervised(draft: Draft) -> None:
    """Leave out what supervised runs never use: advantages, and engines when the data is the only source."""
    supervised = draft.algorithm.loss_type == "sft_loss"
    if supervised and draft.algorithm.compute_advantages_and_returns:
        draft.algorithm = replace(draft.algorithm, compute_advantages_and_returns=False)
    if supervised and draft.rollout.rollout_temperature != 1.0:
        draft.notices.append(
            f"--loss-type sft_loss with --rollout-temperature {draft.rollout.rollout_temperature:g}: the likelihood is "
            "that of the model at this temperature; leave the flag out for the plain one"
        )
    if is_supervised(draft.rollout.rollout_function_path):
        _from_data(draft, supervised)


def is_supervised(rollout_function_path: str) -> bool:
    """Whether a rollout function is ours that takes conversations as they are."""
    return rollout_function_path.replace(":", ".") == SUPERVISED_ROLLOUT


def _from_data(draft: Draft, supervised: bool) -> None:
    flag = f"--rollout-function-path {draft.rollout.rollout_function_path}"
    if draft.data.apply_chat_template:
        draft.problems.append(
            f"{flag} renders conversations by itself, to know which tokens the assistant wrote; remove "
            "--apply-chat-template"
        )
    evaluates = draft.eval.eval_prompt_data or draft.eval.eval_config is not None
    if evaluates and draft.eval.eval_function_path is None:
        draft.problems.append(
            f"{flag} cannot evaluate; name a function that can with --eval-function-path, e.g. "
            "slime.rollout.sglang_rollout.generate_rollout, or remove the evaluation data"
        )
    if not supervised:
        draft.notices.append(f"{flag} gives no rewards: --loss-type {draft.algorithm.loss_type} has nothing to follow")
    if not evaluates and not draft.debug.debug_rollout_only and not draft.debug.debug_train_only:
        draft.debug = replace(draft.debug, debug_train_only=True)
        draft.notices.append(f"{flag} generates nothing: no engines are started")
