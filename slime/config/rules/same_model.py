"""Whether a Hugging Face directory holds weights of the model that is trained.

The trainer builds one model, from ``--hf-checkpoint``; whoever's weights are loaded into it are computed with in its
shape, rope and norms. What differs fails late at best and is silently wrong at worst.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.config.draft import Draft
from slime.config.hf import normalize_config, read_config_json

_FACTS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings", "rope_theta", "rope_scaling", "rms_norm_eps"),
    # Multi-latent attention
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    # Mixtures of experts
    *("num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace"),
    *("shared_expert_intermediate_size", "n_shared_experts", "mlp_only_layers", "n_group", "topk_group"),
)
"""What the model takes from config.json."""
_NEUTRAL: Mapping[str, Any] = {"n_group": 1, "topk_group": 1}
"""What an entry means that is not written down, where that is not nothing."""


def other_model(draft: Draft, path: str, *, ours: str, own_head: bool = False) -> list[str]:
    """How the model in a directory differs from the one that is trained; empty when it does not.

    Args:
        draft: Knows ``--hf-checkpoint``; without a readable one nothing is compared.
        path: A Hugging Face directory of a supported family.
        ours: What the trained model is called behind a differing value.
        own_head: Whether the trained model has an output layer of its own, so that the other's does not matter.
    """
    if draft.hf is None:
        return []
    theirs, own = normalize_config(read_config_json(Path(path) / "config.json")), draft.hf.config
    return [
        f"{name} {theirs.get(name)} ({ours}: {own.get(name)})"
        for name in _FACTS
        if _value(theirs, name) != _value(own, name) and not (own_head and name == "tie_word_embeddings")
    ]


def _value(config: Mapping[str, Any], name: str) -> Any:
    return config.get(name) or _NEUTRAL.get(name)
