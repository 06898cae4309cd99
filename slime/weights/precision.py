"""In which dtype an engine holds its tensors."""

from __future__ import annotations

import torch

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_FLOAT32_ENDINGS = (".e_score_correction_bias",)
"""Added to scores between 0 and 1 to choose experts: bfloat16 would merge values that choose differently."""


def held_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the tensor called ``name`` (its Hugging Face name) in an engine whose model has ``model_dtype``."""
    return torch.float32 if name.endswith(_FLOAT32_ENDINGS) else model_dtype


def stated_dtype(name: object) -> torch.dtype | None:
    """The dtype that an engine or a ``config.json`` names; None if that is none, such as ``auto``."""
    return _DTYPES.get(str(name).removeprefix("torch."))
