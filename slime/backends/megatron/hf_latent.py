"""Megatron's multi-latent-attention flags as a Hugging Face ``config.json`` implies them.

Owns the mapping of the DeepSeek V3 family; ``hf_flags`` merges it with the flags all models have. Tests
hold: as there.
"""

from collections.abc import Mapping
from typing import Any

from slime.config import HfModel

HF_NAMES: Mapping[str, str] = {
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "rotary_scaling_factor": "rope_scaling",
    "mscale": "rope_scaling",
    "mscale_all_dim": "rope_scaling",
    "rope_type": "rope_scaling",
}
"""Megatron's destination -> the entry of ``config.json`` it follows from, where names differ."""


def latent_values(hf: HfModel) -> dict[str, Any]:
    """Megatron destinations and values; they replace those of grouped-query attention."""
    scaling = hf.get("rope_scaling") or {}
    # Both or none: otherwise the checkpoint's factor of sine and cosine is that of mscale 1 alone.
    both = bool(scaling.get("mscale")) and bool(scaling.get("mscale_all_dim"))
    return {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "num_query_groups": hf["num_attention_heads"],
        "qk_layernorm": True,
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "yarn" if scaling else "rope",
        "rotary_scaling_factor": float(scaling.get("factor", 1.0)),
        "mscale": float(scaling["mscale"]) if both else 1.0,
        "mscale_all_dim": float(scaling["mscale_all_dim"]) if both else 0.0,
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings") or 4096,
    }


def unsupported_latent(hf: HfModel) -> list[str]:
    """Features of a checkpoint that the model would silently lack; without the place, which the caller adds."""
    scaling = hf.get("rope_scaling") or {"rope_type": "yarn"}
    problems: list[str] = []
    if scaling["rope_type"] != "yarn":
        problems.append(f"rope_scaling of type {scaling['rope_type']!r} is not supported; accepted: yarn, none")
    if scaling.get("mscale_all_dim") and not scaling.get("mscale"):
        problems.append("rope_scaling has mscale_all_dim without mscale, which is not supported")
    if not hf.get("rope_interleave", True):
        problems.append("rope_interleave false is not supported")
    return problems
