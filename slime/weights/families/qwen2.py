"""Qwen2 and Qwen2.5, dense: biases on query, key and value."""

from slime.weights.families.dense import ATTENTION, EMBEDDING_RULE, HEAD, MLP, qkv
from slime.weights.families.family import Family

QWEN2 = Family(model_type="qwen2", rules=(EMBEDDING_RULE, *ATTENTION, qkv("bias"), *MLP, *HEAD), qkv_bias=True)
