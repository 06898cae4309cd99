"""The shape of a model, read from ``config.json`` of a Hugging Face directory.

Covers decoders of the Llama, Qwen2 and Qwen3 kind. Every field that would change the computation and is not covered
is an error, never a silent approximation. Leaves out weights and computation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    rope_theta: float
    rope_scaling: Mapping[str, Any]
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
    theta, scaling = rope_settings(config)
    return ModelShape(
        architecture=architecture,
        model_type=str(config["model_type"]),
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(config.get("head_dim") or hidden // heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope_theta=theta,
        rope_scaling=scaling,
        dtype=DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32),
        eos_token_ids=_eos_ids(config, _read_json(path / "generation_config.json") or {}),
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


def rope_settings(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Rope base and scaling from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Raises:
        ConfigError: A kind of scaling that the embedded engine lacks.
    """
    scaling: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} in config.json; the embedded engine has default, linear and llama3")
    scaling["rope_type"] = kind
    return theta, scaling


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Rotation per position of each pair of channels, ``[head_dim / 2]`` float32.

    The ``llama3`` rule keeps short wavelengths, divides long ones by ``factor`` and blends between
    (https://arxiv.org/abs/2407.21783, section 3).
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    inverse = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling["rope_type"] == "linear":
        return inverse / float(scaling["factor"])
    if scaling["rope_type"] == "default":
        return inverse
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / inverse
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelengths > original / low, inverse / factor, inverse)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(between, blended, scaled)


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        if isinstance(value, int):
            found.add(value)
        elif value:
            found.update(int(v) for v in value)
    return tuple(sorted(found))
