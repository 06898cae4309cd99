"""Which tensors an engine holds in float32 whatever the dtype of its model."""

from __future__ import annotations

import torch

_FLOAT32_ENDINGS = (".e_score_correction_bias",)
"""Added to scores between 0 and 1 to choose experts: bfloat16 would merge values that choose differently."""


def held_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the tensor called ``name`` (its Hugging Face name) in an engine whose model has ``model_dtype``."""
    return torch.float32 if name.endswith(_FLOAT32_ENDINGS) else model_dtype
