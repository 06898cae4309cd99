"""Which engine generates and how it is split."""

from __future__ import annotations

from dataclasses import replace

from slime.config.draft import Draft
from slime.config.rules.deployment import check_deployment


def resolve_engines(draft: Draft) -> None:
    """Choose the engine and check the settings that concern it."""
    engine = draft.engine
    if engine.rollout_backend == "auto":
        wants_sglang = draft.cluster.device == "cuda" and draft.surroundings.sglang_installed
        draft.engine = replace(engine, rollout_backend="sglang" if wants_sglang else "embedded")
    elif engine.rollout_backend == "sglang" and not draft.surroundings.sglang_installed and not draft.external_engines:
        draft.problems.append(
            "--rollout-backend sglang: the package sglang is not installed in this environment; install it as "
            "docs/engines.md says, or use embedded"
        )
    if engine.sglang_router_ip is not None and engine.sglang_router_port is None:
        draft.problems.append("--sglang-router-ip names a router that already runs; add its --sglang-router-port")
    check_deployment(draft)
    if draft.engine.rollout_backend == "embedded":
        _embedded(draft)


def _embedded(draft: Draft) -> None:
    per_engine = draft.cluster.rollout_num_gpus_per_engine
    if draft.deployment or draft.external_engines:  # their sizes are their own
        return
    if per_engine != 1 and not draft.debug.debug_train_only:
        draft.problems.append(
            f"--rollout-num-gpus-per-engine {per_engine}: the embedded engine runs in one process; use 1"
        )
