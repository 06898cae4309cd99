"""Megatron's mixture-of-experts flags as a Hugging Face ``config.json`` implies them.

Owns the mapping per family; ``hf_flags`` merges it with the flags all models have. Tests hold: as there.
"""

from collections.abc import Callable, Mapping
from typing import Any

from slime.config import HfModel

HF_NAMES: Mapping[str, str] = {
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "moe_router_pre_softmax": "norm_topk_prob",
    "moe_layer_freq": "mlp_only_layers",
}
"""Megatron's destination -> the entry of ``config.json`` it follows from, where names differ."""


def expert_values(hf: HfModel) -> dict[str, Any]:
    """Megatron destinations and values; empty for a dense model."""
    values_of = _VALUES.get(hf.model_type)
    return values_of(hf) if values_of else {}


def layer_pattern(frequency: Any, num_layers: int) -> list[int]:
    """``--moe-layer-freq`` as one number per layer: 1 for a mixture of experts, 0 for a dense MLP."""
    if isinstance(frequency, int):
        return [int(i % frequency == 0) for i in range(num_layers)]
    return list(frequency)


def _qwen(hf: HfModel) -> dict[str, Any]:
    layers, step, dense = hf["num_hidden_layers"], hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or ()
    shared = hf.get("shared_expert_intermediate_size") if hf.model_type == "qwen2_moe" else None
    return {
        "num_experts": hf["num_experts"],
        "moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in range(layers)],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared is not None,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        # Megatron's softmax over the chosen experts alone is the one whose weights sum to 1.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_enable_expert_bias": False,
    }


_VALUES: Mapping[str, Callable[[HfModel], dict[str, Any]]] = {"qwen2_moe": _qwen, "qwen3_moe": _qwen}
