"""Flags that belong to the interface but have nothing behind them in this version.

One row per field: the values that are accepted today. The parser knows all of these flags, so a command
line is never told that such a flag does not exist; a later version deletes its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.draft import Draft
from slime.config.flags import FlagSpec, flag_specs, words
from slime.config.schema import SECTIONS

_DEFAULT_ONLY: tuple[Any, ...] = ()

AVAILABLE_VALUES: Mapping[str, tuple[Any, ...]] = {
    # Placement and processes
    "use_distributed_post": _DEFAULT_ONLY,
    "http_proxy": _DEFAULT_ONLY,
    # Rollout data
    "rollout_data_transport": _DEFAULT_ONLY,
    "rollout_buffer_url": _DEFAULT_ONLY,
    "fetch_trajectory_retry_times": _DEFAULT_ONLY,
    "min_batch_collection_ratio": _DEFAULT_ONLY,
    "rollout_task_type": _DEFAULT_ONLY,
    "load_forge_rollout_data": _DEFAULT_ONLY,
    "max_weight_staleness": _DEFAULT_ONLY,
    "multimodal_keys": _DEFAULT_ONLY,
    # Objective
    "use_stateless_adam": _DEFAULT_ONLY,
    # Model
    "model_name": _DEFAULT_ONLY,
    "allgather_cp": _DEFAULT_ONLY,
    "freeze_indexer": _DEFAULT_ONLY,
    "qwen_gdn_backend": _DEFAULT_ONLY,
    "mtp_num_layers": (None, 0),
    "enable_mtp_training": _DEFAULT_ONLY,
    "mtp_loss_scaling_factor": _DEFAULT_ONLY,
    "megatron_deepgemm_forward_layers": _DEFAULT_ONLY,
    "megatron_deepgemm_moe_forward_layers": _DEFAULT_ONLY,
    "megatron_deepgemm_forward_modules": _DEFAULT_ONLY,
    "megatron_deepgemm_moe_forward_modules": _DEFAULT_ONLY,
    # Dumps, profiling and checks
    "memory_snapshot_dir": _DEFAULT_ONLY,
    "memory_snapshot_num_steps": _DEFAULT_ONLY,
    "record_memory_history": _DEFAULT_ONLY,
    "memory_recorder": _DEFAULT_ONLY,
    "profile_target": _DEFAULT_ONLY,
}
"""Field -> values that work in this version; an empty row: only the default."""

UNAVAILABLE_EVAL_KEYS: frozenset[str] = frozenset(
    {
        "app_service", "eval_early_stop_idle_timeout", "eval_early_stop_remaining", "eval_task_timeout",
        "message_processor", "min_eval_samples", "remote_environment", "reward_model",
    }
)  # fmt: skip
"""Settings of an evaluation set in ``--eval-config`` that belong to the interface and that nothing reads."""

UNAVAILABLE_MODEL_FLAGS: frozenset[str] = frozenset(
    {
        "--fused-select-topk-block-size", "--index-absorb-kv-norm-fp32", "--index-dsa-use-layernorm",
        "--index-kd-loss-coeff", "--index-num-attention-heads", "--index-skip-topk-offset", "--index-topk-freq",
        "--index-use-fused-bwd-tilelang", "--index-use-torch-topk", "--post-mlp-layernorm",
        "--post-self-attn-layernorm", "--use-gated-attention",
    }
)  # fmt: skip
"""Model flags of the interface that stock Megatron does not have."""


def is_available(dest: str, value: Any) -> bool:
    """Whether this version has something behind ``value`` of the field ``dest``."""
    accepted = AVAILABLE_VALUES.get(dest)
    if accepted is None:
        return True
    return value in accepted if accepted else value == _specs()[dest].default


def accepted_text(spec: FlagSpec) -> str:
    """The accepted values of a restricted flag, for messages and the reference page."""
    accepted = [str(value) for value in AVAILABLE_VALUES[spec.dest] if value is not None]
    if accepted:
        return f"accepted today: {', '.join(accepted)}"
    if spec.form in ("on", "off", "pair") or spec.default is None:
        return "leave it out"
    return f"accepted today: {words(spec.default)}"


def check_availability(draft: Draft) -> None:
    """Report every setting that nothing would read."""
    specs = _specs()
    for dest in AVAILABLE_VALUES:
        spec = specs[dest]
        value = getattr(getattr(draft, spec.section), dest)
        if dest not in draft.given or is_available(dest, value):
            continue
        shown = "" if spec.form in ("on", "off", "pair", "json") else f" {words(value)}"
        draft.problems.append(
            f"{spec.name}{shown} is part of the interface but not available in this version; {accepted_text(spec)}"
        )


def _specs() -> dict[str, FlagSpec]:
    return {spec.dest: spec for name, section in SECTIONS.items() for spec in flag_specs(section, name)}
