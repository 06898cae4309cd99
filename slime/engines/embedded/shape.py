"""The shape of a model, read from ``config.json`` of a Hugging Face directory.

Covers decoders of the Llama, Qwen2, Qwen3, Qwen2-MoE, Qwen3-MoE, GLM-4-MoE and DeepSeek-V3 kind. Every field that would
change the computation and is not covered is an error, never a silent approximation. Leaves out weights and computation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from slime.engines.embedded.kv import CacheShape
from slime.engines.embedded.rope import RopeShape, read_rope
from slime.errors import ConfigError

_QWEN_MOE = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
_DEEPSEEK, _GLM = "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", *_QWEN_MOE, _GLM, _DEEPSEEK)
_GLM_ROTARY_SHARE = 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """Sizes and switches of the layers with experts.

    Args:
        num_experts: Experts per layer.
        num_active: Experts per token.
        expert_size: Width of one expert.
        scores: How router logits become scores: ``softmax``, or ``sigmoid`` plus a bias that only chooses.
        num_groups: Groups of experts; a token may use those of ``num_active_groups`` of them.
        num_active_groups: See ``num_groups``.
        normalised: Whether the weights of a token's experts sum to one (before ``scaling``).
        scaling: Factor of the weights.
        shared_size: Width of the expert that every token uses; 0 for none.
        shared_name: What the checkpoint calls it.
        shared_gate: Whether its output is gated.
        layers: Which layers have experts.
    """

    num_experts: int
    num_active: int
    expert_size: int
    scores: Literal["softmax", "sigmoid"]
    num_groups: int = 1
    num_active_groups: int = 1
    normalised: bool
    scaling: float = 1.0
    shared_size: int = 0
    shared_name: str = "shared_expert"
    shared_gate: bool = False
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Sizes of latent attention; ``q_rank`` None means that queries are not compressed."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes and switches of one decoder."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeShape
    experts: ExpertShape | None
    latent: LatentShape | None
    num_spare_layers: int
    """Layers of the checkpoint behind the last one, for predicting several tokens; not run here."""
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def cache(self) -> CacheShape:
        """What is kept of a token."""
        routes = self.experts.num_active if self.experts is not None else 0
        common = {"num_layers": self.num_layers, "num_heads": self.num_heads, "num_routes": routes}
        latent = self.latent
        if latent is None:
            scale = self.head_dim**-0.5
            return CacheShape(
                **common, num_kv_heads=self.num_kv_heads, key_dim=self.head_dim, value_dim=self.head_dim, scale=scale
            )
        return CacheShape(
            **common,
            num_kv_heads=1,
            key_dim=latent.kv_rank + latent.rope_dim,
            value_dim=latent.kv_rank,
            scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * self.rope.score_scale,
            values_in_keys=True,
        )


def read_shape(model_path: str | Path) -> ModelShape:
    """Read and check ``config.json`` (and the eos ids of ``generation_config.json``).

    Raises:
        ConfigError: No such file, another architecture, or a feature that the embedded engine lacks.
    """
    path = Path(model_path)
    config = _read_json(path / "config.json")
    if config is None:
        raise ConfigError(f"--model-path {path} has no config.json; give a Hugging Face model directory")
    architecture = str((config.get("architectures") or ["(none)"])[0])
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"--model-path {path} is a {architecture}; the embedded engine runs {', '.join(ARCHITECTURES)}. "
            "Use --rollout-backend sglang for other models"
        )
    _refuse_unsupported(config, path)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ConfigError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    attention_bias = bool(config.get("attention_bias", False))
    latent = _latent_shape(config) if architecture == _DEEPSEEK else None
    head_dim = int(config.get("head_dim") or hidden // heads)
    return ModelShape(
        architecture=architecture,
        model_type=str(config["model_type"]),
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=_has_qkv_bias(architecture, config),
        o_bias=attention_bias and not architecture.startswith(("Qwen2", "Glm4")),
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture.startswith("Qwen3") or (architecture == _GLM and bool(config.get("use_qk_norm"))),
        rope=read_rope(
            config,
            head_dim if latent is None else latent.rope_dim,
            partial=_GLM_ROTARY_SHARE if architecture == _GLM else None,
        ),
        experts=_expert_shape(architecture, config, path),
        latent=latent,
        num_spare_layers=int(config.get("num_nextn_predict_layers") or 0),
        dtype=DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32),
        eos_token_ids=_eos_ids(config, _read_json(path / "generation_config.json") or {}),
    )


def _has_qkv_bias(architecture: str, config: Mapping[str, Any]) -> bool:
    if architecture == "Qwen2MoeForCausalLM":
        return bool(config.get("qkv_bias", True))
    return architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False))


def _latent_shape(config: Mapping[str, Any]) -> LatentShape:
    q_rank = config.get("q_lora_rank")
    return LatentShape(
        q_rank=None if q_rank is None else int(q_rank),
        kv_rank=int(config["kv_lora_rank"]),
        nope_dim=int(config["qk_nope_head_dim"]),
        rope_dim=int(config["qk_rope_head_dim"]),
        value_dim=int(config["v_head_dim"]),
        interleaved=bool(config.get("rope_interleave", True)),
    )


def _expert_shape(architecture: str, config: Mapping[str, Any], path: Path) -> ExpertShape | None:
    num_layers = int(config["num_hidden_layers"])
    if architecture in (_DEEPSEEK, _GLM):
        return _deepseek_experts(config, num_layers, path)
    if architecture not in _QWEN_MOE:
        return None
    dense, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step", 1))
    has_shared = architecture == "Qwen2MoeForCausalLM"
    return ExpertShape(
        num_experts=int(config["num_experts"]),
        num_active=int(config["num_experts_per_tok"]),
        expert_size=int(config["moe_intermediate_size"]),
        scores="softmax",
        normalised=bool(config.get("norm_topk_prob", False)),
        shared_size=int(config["shared_expert_intermediate_size"]) if has_shared else 0,
        shared_gate=has_shared,
        layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
    )


def _deepseek_experts(config: Mapping[str, Any], num_layers: int, path: Path) -> ExpertShape:
    if config.get("scoring_func", "sigmoid") != "sigmoid" or config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ConfigError(
            f"{path}: scoring_func {config.get('scoring_func')!r} and topk_method {config.get('topk_method')!r}; the "
            "embedded engine has sigmoid and noaux_tc"
        )
    if int(config.get("moe_layer_freq") or 1) != 1:
        raise ConfigError(f"{path}: moe_layer_freq {config['moe_layer_freq']}; the embedded engine has 1")
    num_experts, num_groups = int(config["n_routed_experts"]), int(config.get("n_group") or 1)
    if num_experts % num_groups:
        raise ConfigError(f"{path}: n_routed_experts {num_experts} is no multiple of n_group {num_groups}")
    expert_size = int(config["moe_intermediate_size"])
    return ExpertShape(
        num_experts=num_experts,
        num_active=int(config["num_experts_per_tok"]),
        expert_size=expert_size,
        scores="sigmoid",
        num_groups=num_groups,
        num_active_groups=int(config.get("topk_group") or 1),
        normalised=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor", 1.0)),
        shared_size=expert_size * int(config.get("n_shared_experts") or 0),
        shared_name="shared_experts",
        layers=frozenset(range(int(config.get("first_k_dense_replace") or 0), num_layers)),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    problems: list[str] = []
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"{path}: hidden_act {config['hidden_act']!r}; the embedded engine has silu")
    if config.get("use_sliding_window"):
        problems.append(f"{path}: use_sliding_window is true; the embedded engine has full attention only")
    if config.get("quantization_config"):
        problems.append(f"{path}: quantised weights; the embedded engine reads float32, bfloat16 and float16")
    if problems:
        raise ConfigError(problems)


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        if isinstance(value, int):
            found.add(value)
        elif value:
            found.update(int(v) for v in value)
    return tuple(sorted(found))
