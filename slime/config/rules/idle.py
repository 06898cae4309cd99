"""Flags that were given and that nothing reads without another one: the run starts, and says so."""

from __future__ import annotations

from slime.config.draft import Draft
from slime.config.sections.algorithm import CRITIC_ESTIMATORS, DISCOUNTED_ESTIMATORS

_OF_POLICY_LOSS = (
    *("use_tis", "use_icepop", "use_rs", "use_opsm", "use_kl_loss", "kl_coef", "normalize_advantages"),
    *("overlong_buffer_len", "eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef"),
)


def check_idle(draft: Draft) -> None:
    """Name what was given in vain."""
    algorithm = draft.algorithm
    for name, is_read, needed in (
        ("max_logprob_diff_action", algorithm.max_logprob_diff is not None, "--max-logprob-diff"),
        ("opsm_delta", algorithm.use_opsm, "--use-opsm"),
        ("use_unbiased_kl", algorithm.use_kl_loss, "--use-kl-loss"),
        ("async_save", draft.checkpoint.save is not None, "--save or --save-interval"),
    ):
        if name in draft.given and not is_read:
            draft.notices.append(f"{draft.flag_of(name)} has no effect without {needed}")
    if algorithm.loss_type == "sft_loss":
        _name(draft, _OF_POLICY_LOSS, "with --loss-type sft_loss")
    elif algorithm.custom_advantage_function_path is None:  # which may read any of these
        if algorithm.advantage_estimator not in DISCOUNTED_ESTIMATORS:
            _name(draft, ("gamma",), f"with --advantage-estimator {algorithm.advantage_estimator}")
        if algorithm.advantage_estimator not in CRITIC_ESTIMATORS:
            _name(draft, ("lambd", "value_clip"), f"with --advantage-estimator {algorithm.advantage_estimator}")


def _name(draft: Draft, names: tuple[str, ...], why: str) -> None:
    idle = [draft.flag_of(name) for name in names if name in draft.given]
    if idle:
        draft.notices.append(f"{', '.join(idle)}: no effect {why}")
