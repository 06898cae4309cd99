"""Qwen2 and Qwen2.5, dense and mixture of experts: biases on query, key and value."""

from slime.weights.families.dense import ATTENTION, EMBEDDING_RULE, HEAD, MLP, qkv
from slime.weights.families.experts import EXPERTS, ROUTER, SHARED_GATE, shared_expert
from slime.weights.families.family import Family

QWEN2 = Family(model_type="qwen2", rules=(EMBEDDING_RULE, *ATTENTION, qkv("bias"), *MLP, *HEAD), qkv_bias=True)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    rules=(
        *(EMBEDDING_RULE, *ATTENTION, qkv("bias"), *MLP),
        *(ROUTER, *EXPERTS, SHARED_GATE, *shared_expert("shared_expert"), *HEAD),
    ),
    qkv_bias=True,
    qkv_bias_key="qkv_bias",
)
