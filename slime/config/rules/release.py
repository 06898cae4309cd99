"""Training processes that end while engines generate: what they must find again afterwards."""

from __future__ import annotations

from dataclasses import replace

from slime.config.draft import Draft
from slime.config.sections.algorithm import CRITIC_ESTIMATORS

_FLAG = "--release-train"


def resolve_release(draft: Draft) -> None:
    """Save every rollout, and refuse what a checkpoint does not hold."""
    if not draft.train.release_train:
        return
    checkpoint, weights = draft.checkpoint, draft.weights
    if checkpoint.save is None:
        draft.problems.append(f"{_FLAG} needs --save: new training processes continue from the last checkpoint there")
    if checkpoint.save_interval is None:
        draft.checkpoint = replace(checkpoint, save_interval=1)
    elif checkpoint.save_interval != 1:
        draft.problems.append(
            f"{_FLAG} with --save-interval {checkpoint.save_interval}: rollouts between two checkpoints would be lost; "
            "use 1, and --keep-checkpoints to save disk space"
        )
    if checkpoint.no_save_optim:
        draft.problems.append(
            f"{_FLAG} and --no-save-optim exclude each other: the optimizer would start anew each time"
        )
    if weights.update_weight_mode != "full" or weights.update_weight_transport != "disk":
        draft.problems.append(
            f"{_FLAG} needs --update-weight-mode full and --update-weight-transport disk, found "
            f"{weights.update_weight_mode} and {weights.update_weight_transport}"
        )
    if draft.algorithm.advantage_estimator in CRITIC_ESTIMATORS:
        draft.problems.append(
            f"{_FLAG} works without a critic, found --advantage-estimator {draft.algorithm.advantage_estimator}"
        )
    if draft.rollout.keep_old_actor:
        draft.problems.append(f"{_FLAG} and --keep-old-actor exclude each other")
    if weights.check_weight_update_equal:
        draft.problems.append(
            f"{_FLAG} and --check-weight-update-equal exclude each other: new processes have other weights than those "
            "the engines loaded at their start"
        )
    moved = [name for name in ("offload", "offload_train") if name in draft.given and getattr(draft.cluster, name)]
    if moved:
        draft.problems.append(
            f"{draft.flag_of(moved[0])} and {_FLAG} exclude each other: ended processes hold no memory"
        )
    else:
        draft.cluster = replace(draft.cluster, offload_train=False)
