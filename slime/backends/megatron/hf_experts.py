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
    "moe_layer_freq": "first_k_dense_replace",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
}
"""Megatron's destination -> the entry of ``config.json`` it follows from, where names differ."""


QWEN_NAMES: Mapping[str, str] = {"moe_layer_freq": "mlp_only_layers"}
"""The same where Qwen's entry is another one."""


def expert_values(hf: HfModel) -> dict[str, Any]:
    """Megatron destinations and values; of a dense model only that it has no experts."""
    values_of = _VALUES.get(hf.model_type)
    return values_of(hf) if values_of else {"num_experts": None}


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


def _deepseek(hf: HfModel) -> dict[str, Any]:
    layers, step, first = hf["num_hidden_layers"], hf.get("moe_layer_freq") or 1, hf.get("first_k_dense_replace") or 0
    shared = (hf.get("n_shared_experts") or 0) * hf["moe_intermediate_size"]
    return {
        "num_experts": hf["n_routed_experts"],
        "moe_layer_freq": [int(i >= first and i % step == 0) for i in range(layers)],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": False,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor") or 1.0),
        "moe_router_num_groups": hf.get("n_group") or 1,
        "moe_router_group_topk": hf.get("topk_group") or 1,
        "moe_router_enable_expert_bias": True,
    }


def unsupported_experts(hf: HfModel) -> list[str]:
    """Features of a checkpoint that the model would silently lack; without the place, which the caller adds."""
    if _VALUES.get(hf.model_type) is not _deepseek:
        return []
    problems: list[str] = []
    if not hf.get("norm_topk_prob", True):
        problems.append("norm_topk_prob false is not supported")
    groups, chosen, topk = hf.get("n_group") or 1, hf.get("topk_group") or 1, hf["num_experts_per_tok"]
    # A group's score is the sum of its best two experts; Megatron takes the best topk / topk_group.
    if groups > 1 and topk // chosen != 2:
        problems.append(
            f"num_experts_per_tok {topk} with topk_group {chosen} is not supported: the former must be twice the latter"
        )
    for key, accepted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if hf.get(key, accepted) != accepted:
            problems.append(f"{key} {hf[key]!r} is not supported; accepted: {accepted}")
    return problems


_VALUES: Mapping[str, Callable[[HfModel], dict[str, Any]]] = {
    "deepseek_v3": _deepseek,
    "glm4_moe": _deepseek,
    "kimi_k2": _deepseek,
    "qwen2_moe": _qwen,
    "qwen3_moe": _qwen,
}
