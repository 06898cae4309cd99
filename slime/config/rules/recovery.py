"""Health checks that the engines can pass."""

from __future__ import annotations

from slime.config.draft import Draft

_SLOWEST_SGLANG_ANSWER = 1.0


def check_recovery(draft: Draft) -> None:
    """Refuse a time-out that no healthy engine would keep, and say what is not replaced."""
    seconds = draft.cluster.rollout_health_check_timeout
    if draft.engine.rollout_backend == "sglang" and seconds <= _SLOWEST_SGLANG_ANSWER:
        draft.problems.append(
            f"--rollout-health-check-timeout {seconds:g}: SGLang takes a second to answer a health check; give more "
            f"than {_SLOWEST_SGLANG_ANSWER:g}, 5 for example"
        )
    if draft.cluster.use_fault_tolerance and draft.rollout.rollout_external_engine_addrs:
        draft.notices.append(
            "--use-fault-tolerance does not check or replace the engines of --rollout-external-engine-addrs"
        )
    if draft.cluster.use_fault_tolerance and draft.engine.sglang_router_ip is not None:
        draft.notices.append("--use-fault-tolerance does not check or replace the router of --sglang-router-ip")
