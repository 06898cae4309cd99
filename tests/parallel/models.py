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
}


def make_model(name: str, folder: Path) -> Path:
    """Write the model ``name`` below ``folder``."""
    family, shape = SHAPES[name]
    path = make_tiny_model(folder / name, family, **{"num_hidden_layers": 4, **shape})
    if shape.get("tie_word_embeddings"):
        # As an output layer the embedding gives logits so large that rounding alone moves the gradient norm by 1e-6.
        weights = load_file(path / "model.safetensors")
        weights["model.embed_tokens.weight"] *= 0.3
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
