"""Context, prompt and response lengths, in tokens."""

from __future__ import annotations

from dataclasses import replace

from slime.config.draft import Draft

DEFAULT_RESPONSE_LENGTH = 1024


def resolve_lengths(draft: Draft) -> None:
    """Derive missing lengths and check that they fit each other and the model."""
    rollout = draft.rollout
    context = rollout.rollout_max_context_len
    if context is not None:
        if rollout.rollout_max_prompt_len is None:
            rollout = replace(rollout, rollout_max_prompt_len=context - 1)
        elif rollout.rollout_max_prompt_len > context - 1:
            draft.problems.append(
                f"--rollout-max-prompt-len {rollout.rollout_max_prompt_len} must be at most "
                f"--rollout-max-context-len minus 1 ({context - 1})"
            )
    if rollout.rollout_max_response_len is None:
        length = context if context is not None else DEFAULT_RESPONSE_LENGTH
        rollout = replace(rollout, rollout_max_response_len=length)
        if context is None and not draft.debug.debug_train_only:
            draft.notices.append(f"no --rollout-max-response-len: at most {length} response tokens per sample")
    draft.rollout = rollout
    _check_model(draft)
    _fill_eval(draft)


def _check_model(draft: Draft) -> None:
    limit = None if draft.hf is None else draft.hf.get("max_position_embeddings")
    scaled = draft.hf is not None and draft.hf.get("rope_scaling") is not None
    context, response = draft.rollout.rollout_max_context_len, draft.rollout.rollout_max_response_len
    longest = context or response
    if limit is None or scaled or longest is None or longest <= limit:
        return
    flag = "--rollout-max-context-len" if context is not None else "--rollout-max-response-len"
    if context is None and "rollout_max_response_len" not in draft.given:
        draft.rollout = replace(draft.rollout, rollout_max_response_len=max(1, limit // 2))
        draft.notices.append(
            f"the model has {limit} positions: at most {max(1, limit // 2)} response tokens per sample"
        )
        return
    draft.problems.append(f"{flag} {longest} is more than the model's {limit} positions (max_position_embeddings)")


def _fill_eval(draft: Draft) -> None:
    rollout, evaluation = draft.rollout, draft.eval
    context = evaluation.eval_max_context_len
    if context is None:
        context = rollout.rollout_max_context_len
    prompt = evaluation.eval_max_prompt_len
    if prompt is None:
        prompt = rollout.rollout_max_prompt_len
        if context is not None and prompt is not None:
            prompt = min(prompt, context - 1)
    elif context is not None and prompt > context - 1:
        draft.problems.append(
            f"--eval-max-prompt-len {prompt} must be at most --eval-max-context-len minus 1 ({context - 1})"
        )
    draft.eval = replace(evaluation, eval_max_context_len=context, eval_max_prompt_len=prompt)
