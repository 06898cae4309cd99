"""Requests that run while weights change: a pause that would give wrong results is refused."""

from __future__ import annotations

from slime.config.draft import Draft
from slime.config.engine_plan import gets_weights


def check_pausing(draft: Draft) -> None:
    """Refuse a retraction that SGLang would not do right; ``slime.weights.pause`` asks running engines for the rest."""
    debug = draft.debug
    if draft.weights.update_weight_pause_mode != "retract" or draft.engine.rollout_backend != "sglang":
        return
    if debug.debug_rollout_only or debug.debug_train_only:
        return
    obstacle = None
    if _worker_types(draft) & {"prefill", "decode"}:
        obstacle = "a prefill or decode engine of SGLang keeps prompts that are half computed with the old weights"
    elif draft.algorithm.use_rollout_routing_replay:
        obstacle = (
            "SGLang forgets the experts of tokens that it computes again, which --use-rollout-routing-replay needs"
        )
    if obstacle is not None:
        draft.problems.append(f"--update-weight-pause-mode retract: {obstacle}; use auto or abort")


def _worker_types(draft: Draft) -> set[str]:
    """Kinds of the engines that get the trainer's weights."""
    types = {engine.worker_type for engine in draft.external_engines}
    return types.union(
        *(model.worker_types for model in draft.deployment if gets_weights(model, draft.rollout.hf_checkpoint))
    )
