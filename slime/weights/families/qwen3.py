"""Qwen3, dense: query and key heads are normalised."""

from slime.weights.families.dense import ATTENTION, EMBEDDING_RULE, HEAD, MLP, layer_rule
from slime.weights.families.family import Family
from slime.weights.ops import Rename

_QK_NORM = tuple(
    layer_rule(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", Rename()) for part in "qk"
)
QWEN3 = Family(model_type="qwen3", rules=(EMBEDDING_RULE, *ATTENTION, *_QK_NORM, *MLP, *HEAD), qk_norm=True)
