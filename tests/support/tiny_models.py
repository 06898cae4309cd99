"""Tiny random Hugging Face model directories for tests.

Owns the writing of a complete model directory (``config.json``, ``generation_config.json``, ``model.safetensors`` and
a byte-level tokenizer with a chat template) without importing transformers, so that a test pays milliseconds for it.
Every weight is random, biases and norms included: a test that forgets one of them fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Family = Literal["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(5)))
"""Specials follow the 256 byte tokens: pad is 256, <|im_start|> 257, eos <|im_end|> 258."""
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
PAD_ID, IM_START_ID, EOS_ID = 256, 257, 258

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_tiny_model(
    path: str | Path,
    family: Family = "llama",
    tokenizer: bool = True,
    seed: int = 0,
    matrix_std: float | None = None,
    **overrides: Any,
) -> Path:
    """Write a model directory of about 100,000 parameters.

    Args:
        path: Directory to create or to write into.
        family: Shape: ``llama`` (no biases), ``qwen2`` (q, k and v biases), ``qwen3`` (q and k norms and a
            ``head_dim`` that is not ``hidden_size / num_attention_heads``), ``qwen2_moe`` (a shared expert
            with a gate, weights of the chosen experts not normalised, the first layer dense), ``qwen3_moe``
            (weights normalised); 8 experts, 2 of them per token. ``glm4_moe`` (q, k and v biases and norms,
            half of each head rotary) and ``deepseek_v3`` (multi-latent attention; ``q_lora_rank=None`` for
            Moonlight's, ``rope_scaling`` for yarn) route by sigmoid with an expert bias, have a shared
            expert and a dense first layer; ``deepseek_v3`` has 4 groups of experts and takes 4 per token.
        tokenizer: Whether to write a tokenizer too.
        seed: Seed of the weights; the same seed and shape give the same bytes.
        matrix_std: Standard deviation of every matrix; None keeps those that suit a tiny width.
        **overrides: Entries of ``config.json`` that replace the defaults, such as ``num_hidden_layers=4``,
            ``tie_word_embeddings=True``, ``rope_scaling={...}`` or ``torch_dtype="bfloat16"``; None removes an entry.

    Returns:
        ``path`` as a ``Path``.
    """
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    config = _config(family, overrides)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"eos_token_id": config.get("eos_token_id"), "pad_token_id": PAD_ID}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2))
    weights = tiny_weights(config, seed)
    if matrix_std is not None:
        for matrix in (weight for weight in weights.values() if weight.dim() == 2):
            matrix.mul_(matrix_std / matrix.float().std())
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tiny_tokenizer(out)
    return out


def write_tiny_tokenizer(out: Path) -> None:
    """Write a byte-level tokenizer: one token per UTF-8 byte, special tokens, ChatML template, eos ``<|im_end|>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _config(family: Family, overrides: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family.startswith("qwen3") else 16,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5 if family == "llama" else 1e-6,
        "rope_theta": 10000.0 if family == "llama" else 1000000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if family == "llama":
        del config["use_sliding_window"]
    else:
        del config["mlp_bias"]
    if family.startswith("qwen2"):
        del config["head_dim"], config["attention_bias"]
    if family.startswith("qwen") and family.endswith("_moe"):
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": family == "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    if family == "qwen2_moe":
        config |= {"mlp_only_layers": [0], "shared_expert_intermediate_size": 80}
    if family in ("glm4_moe", "deepseek_v3"):
        del config["use_sliding_window"]
        config |= {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "n_group": 1,
            "topk_group": 1,
        }
    if family == "glm4_moe":
        config |= {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5}
    if family == "deepseek_v3":
        del config["head_dim"]
        config |= {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "rope_interleave": True,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
        }
    config.update(overrides)
    return {k: v for k, v in config.items() if v is not None or k in ("bos_token_id", "q_lora_rank")}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under their Hugging Face names for a ``config.json`` of one of the families."""
    generator = torch.Generator().manual_seed(seed)
    dtype = _DTYPES[str(config.get("torch_dtype", "float32"))]

    def normal(*shape: int, std: float = 0.1, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std + mean).to(dtype)

    hidden = config["hidden_size"]
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=0.5)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        weights[layer + "input_layernorm.weight"] = normal(hidden, mean=1.0)
        weights[layer + "post_attention_layernorm.weight"] = normal(hidden, mean=1.0)
        attention = _latent_attention if "kv_lora_rank" in config else _attention
        for name, shape in attention(config).items():
            mean = 1.0 if "norm" in name else 0.0
            weights[layer + f"self_attn.{name}"] = normal(*shape, mean=mean)
        for name, width in _mlps(config, i):
            for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                weights[layer + f"{name}.{part}_proj.weight"] = normal(*shape)
                if config.get("mlp_bias"):
                    weights[layer + f"{name}.{part}_proj.bias"] = normal(shape[0])
        if _is_mixture(config, i):
            # Spread widely enough that no token's choice of experts hangs on rounding.
            weights[layer + "mlp.gate.weight"] = normal(_num_experts(config), hidden, std=0.5)
            if "n_routed_experts" in config:
                bias = torch.randn(_num_experts(config), generator=generator) * 0.1
                weights[layer + "mlp.gate.e_score_correction_bias"] = bias
            if config.get("shared_expert_intermediate_size"):
                weights[layer + "mlp.shared_expert_gate.weight"] = normal(1, hidden)
    weights["model.norm.weight"] = normal(hidden, mean=1.0)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, std=0.2)
    return weights


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of grouped-query attention."""
    family, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head_dim
    rows = {"q_proj": heads * head_dim, "k_proj": kv, "v_proj": kv}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, hidden) for name, size in rows.items()}
    if family in ("qwen2", "qwen2_moe") or config.get("attention_bias"):
        shapes |= {f"{name}.bias": (size,) for name, size in rows.items()}
    shapes["o_proj.weight"] = (hidden, heads * head_dim)
    if config.get("attention_bias") and family != "glm4_moe":
        shapes["o_proj.bias"] = (hidden,)
    if family in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
        shapes |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    return shapes


def _latent_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of multi-latent attention."""
    hidden, heads, latent, lora = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, rotary, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries: dict[str, tuple[int, ...]] = {"q_proj.weight": (heads * (plain + rotary), hidden)}
    if lora is not None:
        queries = {
            "q_a_proj.weight": (lora, hidden),
            "q_a_layernorm.weight": (lora,),
            "q_b_proj.weight": (heads * (plain + rotary), lora),
        }
    return queries | {
        "kv_a_proj_with_mqa.weight": (latent + rotary, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (plain + value), latent),
        "o_proj.weight": (hidden, heads * value),
    }


def _num_experts(config: dict[str, Any]) -> int:
    return config.get("n_routed_experts") or config.get("num_experts") or 0


def _is_mixture(config: dict[str, Any], layer: int) -> bool:
    if "n_routed_experts" in config:
        return layer >= config["first_k_dense_replace"]
    dense = config.get("mlp_only_layers") or ()
    return "num_experts" in config and layer not in dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _mlps(config: dict[str, Any], layer: int) -> list[tuple[str, int]]:
    """Name and width of every gated MLP of a layer."""
    if not _is_mixture(config, layer):
        return [("mlp", config["intermediate_size"])]
    width, shared = config["moe_intermediate_size"], config.get("shared_expert_intermediate_size")
    found = [(f"mlp.experts.{expert}", width) for expert in range(_num_experts(config))]
    if config.get("n_shared_experts"):
        found.append(("mlp.shared_experts", config["n_shared_experts"] * width))
    return [*found, ("mlp.shared_expert", shared)] if shared else found


def as_in_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a transformers module, which holds the experts of a layer as one, under the names of its files."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".experts.")
        if part == "gate_up_proj":
            for expert, both in enumerate(tensor):
                halves = zip(("gate", "up"), both.chunk(2), strict=True)
                found.update({f"{layer}.experts.{expert}.{half}_proj.weight": rows for half, rows in halves})
        elif part == "down_proj":
            found.update({f"{layer}.experts.{expert}.down_proj.weight": rows for expert, rows in enumerate(tensor)})
        else:
            found[name] = tensor
    return found
