"""Settings that a stock SGLang server refuses at its start or at the first weights, told before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.draft import Draft

_SIZES = ("pp_size", "dp_size", "ep_size", "moe_dp_size")
_NEEDS_CUDA = {
    "enable_deterministic_inference": "its kernels need",
    "speculative_algorithm": "speculative decoding needs",
    "enable_torch_symm_mem": "symmetric memory needs",
    "enable_symm_mem": "symmetric memory needs",
}


def check_sglang_flags(draft: Draft, values: Mapping[str, Any]) -> None:
    """Check how an engine is split, and what its device can do.

    Args:
        draft: Gets the problems.
        values: The engine's values that the user gave, by attribute name.
    """
    if draft.engine.rollout_backend != "sglang" or draft.debug.debug_train_only:
        return
    if draft.rollout.rollout_external_engine_addrs is not None:  # what runs already was accepted by its own parser
        return
    if draft.cluster.device == "cpu":
        draft.problems += [
            f"--sglang-{name.replace('_', '-')}: {why} CUDA, and this run is on a CPU; leave it out"
            for name, why in _NEEDS_CUDA.items()
            if values.get(name)
        ]
    if not draft.deployment:  # its groups are checked with their own sizes
        draft.problems += split_problems(draft.cluster.rollout_num_gpus_per_engine, values)
        draft.problems += stage_problems(draft, values)


def split_problems(num_gpus: int, values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the division of an engine of ``num_gpus`` processes."""
    wrong = [f"--sglang-{name.replace('_', '-')} {values[name]}: must be at least 1" for name in _too_small(values)]
    if wrong:
        return wrong
    pipeline, data, expert, expert_data = (_size(values, name) for name in _SIZES)
    if num_gpus % pipeline:
        problem = (
            f"--rollout-num-gpus-per-engine {num_gpus} is not a multiple of --sglang-pp-size {pipeline}: "
            "their quotient is the tensor-parallel size"
        )
        return [problem]
    problems: list[str] = []
    tensor = num_gpus // pipeline
    here = f"the tensor-parallel size {tensor} (--rollout-num-gpus-per-engine {num_gpus} / --sglang-pp-size {pipeline})"
    if data > 1 and not values.get("enable_dp_attention"):
        problems.append(
            f"--sglang-dp-size {data} needs --sglang-enable-dp-attention; for independent copies raise "
            "--rollout-num-gpus, which starts more engines"
        )
    elif tensor % data:
        problems.append(f"--sglang-dp-size {data} does not divide {here}")
    if tensor % expert_data:
        problems.append(f"--sglang-moe-dp-size {expert_data} does not divide {here}")
    elif tensor % (expert * expert_data):
        product = "" if expert_data == 1 else f" x --sglang-moe-dp-size {expert_data}"
        problems.append(f"--sglang-ep-size {expert}{product} does not divide {here}")
    return problems


def stage_problems(draft: Draft, values: Mapping[str, Any]) -> list[str]:
    """Whether the trainer's weights can reach an engine of so many pipeline stages.

    Args:
        draft: Knows how weights travel, and whether any do.
        values: Arguments of an engine that gets the trainer's weights.
    """
    transport = draft.weights.update_weight_transport
    if _size(values, "pp_size") < 2 or transport == "disk" or draft.debug.debug_rollout_only:
        return []
    problem = (
        "engines of several pipeline stages take weights from disk only, found --update-weight-transport "
        f"{transport}; use disk with --update-weight-disk-dir, or leave --sglang-pp-size out"
    )
    return [problem]


def _too_small(values: Mapping[str, Any]) -> list[str]:
    return [name for name in _SIZES if _size(values, name) < 1]


def _size(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return 1 if value is None else int(value)
