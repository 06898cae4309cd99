"""Sampling values that no engine takes."""

from __future__ import annotations

from slime.config.draft import Draft


def check_sampling(draft: Draft) -> None:
    """``top_k`` counts tokens, or is -1 for all; requests with 0 would fail one by one."""
    if draft.rollout.rollout_top_k == 0:
        draft.problems.append("--rollout-top-k 0 keeps no token; give -1 for all tokens, or at least 1")
    if draft.eval.eval_top_k == 0:
        draft.problems.append("--eval-top-k 0 keeps no token; give -1 for all tokens, or at least 1")
