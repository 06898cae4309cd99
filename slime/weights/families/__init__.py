"""Weight tables of the model families that can be trained, by ``model_type`` of the checkpoint."""

from collections.abc import Mapping

from slime.weights.families import deepseek, glm4_moe, llama, qwen2, qwen3
from slime.weights.families.family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *(deepseek.DEEPSEEK_V3, deepseek.KIMI_K2, glm4_moe.GLM4_MOE, llama.LLAMA),
        *(qwen2.QWEN2, qwen2.QWEN2_MOE, qwen3.QWEN3, qwen3.QWEN3_MOE),
    )
}
