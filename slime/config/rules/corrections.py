"""Combinations of the flags that correct the gap between engine and trainer."""

from __future__ import annotations

from slime.config.draft import Draft
from slime.config.sections import AlgorithmConfig

_BOUND_FLAGS = ("tis_upper_bound", "tis_lower_bound")
_WEIGHT_FLAGS = ("tis_level", "tis_mode")
_REJECTION_FLAGS = ("rs_level", "rs_upper_bound", "rs_lower_bound", "rs_veto_threshold")


def check_corrections(draft: Draft) -> None:
    """Check what excludes or needs what, and that bounds are in order."""
    algorithm = draft.algorithm
    draft.problems += _exclusions(algorithm) + _bound_problems(algorithm)
    own = algorithm.custom_tis_function_path is not None
    if own and not (algorithm.use_tis or algorithm.use_rs or algorithm.get_mismatch_metrics):
        draft.notices.append(
            "--custom-tis-function-path has no effect without --use-tis, --use-rs or --get-mismatch-metrics"
        )
    if own:
        return  # the function may read any of the following
    weighs = algorithm.use_tis or algorithm.use_rs or algorithm.get_mismatch_metrics
    for names, switch, is_on in (
        (("tis_clip", "tis_clip_low"), "--use-tis or --use-icepop", weighs or algorithm.use_icepop),
        # The bounds of --use-rs are by default those of the weights.
        (_BOUND_FLAGS, "--use-tis", weighs),
        (_WEIGHT_FLAGS, "--use-tis", algorithm.use_tis or algorithm.get_mismatch_metrics),
        (("tis_batch_normalize",), "--use-tis", algorithm.use_tis),
        (_REJECTION_FLAGS, "--use-rs", algorithm.use_rs),
    ):
        idle = [draft.flag_of(name) for name in names if name in draft.given]
        if idle and not is_on:
            draft.notices.append(f"{', '.join(idle)}: no effect without {switch}")
    if algorithm.use_tis and algorithm.tis_mode == "truncate" and "tis_lower_bound" in draft.given:
        draft.notices.append("--tis-lower-bound has no effect with --tis-mode truncate; use --tis-mode clip")


def _exclusions(algorithm: AlgorithmConfig) -> list[str]:
    problems: list[str] = []
    weighting = "--use-tis" if algorithm.use_tis else "--use-icepop"
    if algorithm.use_rollout_logprobs and (algorithm.use_tis or algorithm.use_icepop):
        problems.append(
            f"--use-rollout-logprobs and {weighting} exclude each other: the first takes the engine's log-probs as "
            "the old policy, so there is nothing left to correct"
        )
    if algorithm.use_tis and algorithm.use_icepop:
        problems.append("--use-tis and --use-icepop exclude each other: both weigh the same tokens")
    if algorithm.use_icepop and algorithm.custom_tis_function_path is not None:
        problems.append("--use-icepop and --custom-tis-function-path exclude each other: both weigh the same tokens")
    normalizes = algorithm.use_tis and algorithm.tis_batch_normalize and algorithm.loss_type == "policy_loss"
    if normalizes and not algorithm.compute_advantages_and_returns:
        problems.append(
            "--tis-batch-normalize needs the log-prob pass, which --disable-compute-advantages-and-returns leaves out; "
            "remove one of them"
        )
    return problems


def _bound_problems(algorithm: AlgorithmConfig) -> list[str]:
    if algorithm.tis_clip_low > algorithm.tis_clip:
        return [f"--tis-clip-low {algorithm.tis_clip_low:g} must not be larger than --tis-clip {algorithm.tis_clip:g}"]
    problems: list[str] = []
    for name, (low, high), is_used in (
        ("tis", algorithm.tis_bounds, algorithm.use_tis and algorithm.tis_mode != "truncate"),
        ("rs", algorithm.rs_bounds, algorithm.use_rs),
    ):
        if is_used and low > high:
            problems.append(f"--{name}-lower-bound {low:g} must not be larger than --{name}-upper-bound {high:g}")
    return problems
