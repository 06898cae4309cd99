"""Megatron's model flags as a Hugging Face ``config.json`` implies them.

Owns the mapping and the comparison with flags the user gave, such as those of ``scripts/models/*.sh``.
Reads the normalised configuration only. Tests hold: for each family the derived flags build a model
with the checkpoint's log-probs; each contradicting flag is reported, all of them together.
"""

from collections.abc import Mapping
from typing import Any

from slime.backends.megatron.hf_experts import HF_NAMES as _EXPERT_NAMES
from slime.backends.megatron.hf_experts import QWEN_NAMES, expert_values, layer_pattern, unsupported_experts
from slime.backends.megatron.hf_latent import HF_NAMES as _LATENT_NAMES
from slime.backends.megatron.hf_latent import latent_values, unsupported_latent
from slime.config import HfModel
from slime.weights.families import FAMILIES

# Compared with nothing: a different value trains the same model, or is the user's choice.
_NOT_COMPARED = frozenset({"max_position_embeddings", "attention_dropout"})
_WITHOUT_EFFECT_ON_LATENTS = frozenset({"kv_channels", "num_query_groups"})

_FLAGS = {
    "add_bias_linear": "--disable-bias-linear",
    "layernorm_epsilon": "--norm-epsilon",
    "rope_scaling_factor": "--rotary-scaling-factor",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "untie_embeddings_and_output_weights": "tie_word_embeddings",
    "use_rope_scaling": "rope_scaling",
    "rope_scaling_factor": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "rope_scaling",
    "rotary_percent": "partial_rotary_factor",
    "add_qkv_bias": "attention_bias",
    **_EXPERT_NAMES,
    **_LATENT_NAMES,
}


def model_values(hf: HfModel) -> dict[str, Any]:
    """Megatron destinations and values for a checkpoint of a supported family; empty for others."""
    if hf.model_type not in FAMILIES:
        return {}
    theta = hf["rope_theta"]
    theta = 10000.0 if theta is None else theta
    family = FAMILIES[hf.model_type]
    values: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "group_query_attention": True,
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "vocab_size": hf["vocab_size"],
        "max_position_embeddings": hf.get("max_position_embeddings"),
        "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": bool(hf.get(family.qkv_bias_key or "", family.qkv_bias)),
        "qk_layernorm": bool(hf.get("use_qk_norm", family.qk_norm)),
        "position_embedding_type": "rope",
        "rotary_base": int(theta) if float(theta).is_integer() else theta,
        "rotary_percent": hf.get("partial_rotary_factor") or 1.0,
        "use_rope_scaling": False,
        "attention_dropout": 0.0,
        **expert_values(hf),
    }
    scaling = hf.get("rope_scaling")
    if family.latent_attention:
        values.update(latent_values(hf))
    elif scaling and scaling["rope_type"] == "llama3":
        values.update(use_rope_scaling=True, rope_scaling_factor=scaling["factor"])
    elif scaling and scaling["rope_type"] == "linear":
        values.update(rotary_seq_len_interpolation_factor=scaling["factor"])
    return values


def check_model_values(
    derived: Mapping[str, Any], given: Mapping[str, Any], explicit: frozenset[str], hf: HfModel
) -> list[str]:
    """One sentence for every way in which flags and checkpoint do not fit each other.

    Args:
        derived: ``model_values(hf)``.
        given: All parsed values.
        explicit: Destinations the user gave.
        hf: The checkpoint.
    """
    if not derived:
        supported = ", ".join(sorted(FAMILIES))
        return [
            f"--hf-checkpoint {hf.path}: model_type {hf.model_type!r} cannot be trained yet; supported: {supported}"
        ]
    problems = _unsupported(hf)
    given = dict(given)
    if "rotary_scaling_factor" in explicit and "rope_scaling_factor" not in explicit and given["use_rope_scaling"]:
        explicit = explicit | {"rope_scaling_factor"}
        given["rope_scaling_factor"] = given["rotary_scaling_factor"]
    if "moe_layer_freq" in derived:
        given["moe_layer_freq"] = layer_pattern(given["moe_layer_freq"], derived["num_layers"])
    names = _HF_NAMES | QWEN_NAMES if hf.model_type.startswith("qwen") else _HF_NAMES
    latent = FAMILIES[hf.model_type].latent_attention
    ignored = _NOT_COMPARED | _WITHOUT_EFFECT_ON_LATENTS if latent else _NOT_COMPARED
    for dest, expected in derived.items():
        if dest not in explicit or dest in ignored or given[dest] == expected:
            continue
        flag = _FLAGS.get(dest, "--" + dest.replace("_", "-"))
        name = names.get(dest, dest)
        problems.append(
            f"{flag} gives {dest} = {given[dest]!r}, but {name} in {hf.path}/config.json "
            f"({hf.get(name)!r}) means {expected!r}; leave the flag out or use the matching checkpoint"
        )
    return problems


def _unsupported(hf: HfModel) -> list[str]:
    """Features of a checkpoint that its Megatron model would silently lack."""
    where = f"--hf-checkpoint {hf.path}"
    problems: list[str] = []
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        problems.append(f"{where}: hidden_act {activation!r} is not supported; accepted: silu")
    family, scaling = FAMILIES[hf.model_type], hf.get("rope_scaling")
    problems += [f"{where}: {problem}" for problem in unsupported_experts(hf)]
    if family.latent_attention:
        problems += [f"{where}: {problem}" for problem in unsupported_latent(hf)]
    elif scaling and scaling["rope_type"] not in ("llama3", "linear"):
        problems.append(
            f"{where}: rope_scaling of type {scaling['rope_type']!r} is not supported; accepted: llama3, linear, none"
        )
    if hf.get("mlp_bias", False):
        problems.append(f"{where}: mlp_bias is not supported")
    if hf.get("attention_bias", False) and family.qkv_bias_key != "attention_bias":
        problems.append(f"{where}: attention_bias is not supported for {hf.model_type}")
    if hf.get("use_sliding_window", False):
        problems.append(f"{where}: sliding-window attention is not supported; set use_sliding_window to false")
    return problems
