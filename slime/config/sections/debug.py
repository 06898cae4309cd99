"""Dumps, replay, profiling, checks for continuous integration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig(Section):
    """Debugging, profiling and checks."""

    dry_run: bool = flag(False, doc="Check everything, print the plan (processes, batches, memory) and stop.")
    save_debug_rollout_data: str | None = flag(
        None, metavar="FILE", doc="Dump every rollout; {rollout_id} in the path is filled in."
    )
    load_debug_rollout_data: str | None = flag(
        None, metavar="FILE", doc="Train on dumps instead of generating; implies --debug-train-only."
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, above=0, at_most=1, doc="Share of each dump that is used."
    )
    load_forge_rollout_data: str | None = flag(None, metavar="DIR", doc="Train on trajectories made elsewhere.")
    debug_rollout_only: bool = flag(False, doc="Generate without training.")
    debug_train_only: bool = flag(False, doc="Train without engines.")
    save_debug_train_data: str | None = flag(
        None,
        metavar="FILE",
        doc="Dump what every rollout was trained on, with all its columns; {rollout_id} in the path is filled in.",
    )
    dump_details: str | None = flag(
        None, metavar="DIR", doc="Both dumps: DIR/rollout_data/{rollout_id}.pt and DIR/train_data/{rollout_id}.pt."
    )
    memory_snapshot_dir: str = flag(".", doc="Directory of memory snapshots.")
    memory_snapshot_num_steps: int | None = flag(None, at_least=1, doc="Steps recorded in a memory snapshot.")
    record_memory_history: bool = flag(False, doc="Record memory allocations.")
    memory_recorder: Literal["torch", "memray"] = flag("torch", doc="What records memory.")
    profile_target: tuple[str, ...] = flag(
        ("train_overall",),
        choices=("train_overall", "train_actor", "train_log_probs"),
        doc="What is profiled, with Megatron's --use-pytorch-profiler, --profile-step-start and --profile-step-end.",
    )
    ci_test: bool = flag(False, doc="Assert the invariants of the first step.")
    ci_disable_kl_checker: bool = flag(False, doc="Leave the KL checks out.")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, above=0, doc="With --ci-test: bound on the difference between trainer's and engine's log-probs."
    )
    ci_save_grad_norm: str | None = flag(None, metavar="FILE", doc="Record gradient norms.")
    ci_load_grad_norm: str | None = flag(None, metavar="FILE", doc="Compare gradient norms with a record.")
