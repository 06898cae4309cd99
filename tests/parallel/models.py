"""The tiny models of the layout tests: four layers, so that two pipeline stages can be cut in two again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.support.tiny_models import Family, make_tiny_model

SHAPES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "deepseek-half": ("deepseek_v3", {"first_k_dense_replace": 2}),  # the first of two stages has no experts
    "mla": ("deepseek_v3", {"first_k_dense_replace": 4}),
    "mla-moe": ("deepseek_v3", {}),
}


def make_model(name: str, folder: Path) -> Path:
    """Write the model ``name`` below ``folder``."""
    family, shape = SHAPES[name]
    path = make_tiny_model(folder / name, family, **{"num_hidden_layers": 4, **shape})
    weights = load_file(path / "model.safetensors")
    for key, tensor in weights.items():
        tensor *= _scale(key, tied=bool(shape.get("tie_word_embeddings")))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _scale(key: str, *, tied: bool) -> float:
    """Makes a random model smooth: at the edge of saturation rounding alone moves the gradient norm by 1e-6.

    Random output layers give large logits, and normalised random queries and keys attend to single tokens.
    """
    if "lm_head" in key or (tied and "embed_tokens" in key):
        return 0.3
    return 0.5 if "q_norm" in key or "k_norm" in key else 1.0
