"""GLM 4.5 to 4.7, mixture of experts: grouped-query attention, DeepSeek's router and experts."""

from slime.weights.families.dense import ATTENTION, EMBEDDING_RULE, HEAD, MLP, QK_NORM, qkv
from slime.weights.families.experts import EXPERT_BIAS, EXPERTS, ROUTER, shared_expert
from slime.weights.families.family import Family

GLM4_MOE = Family(
    model_type="glm4_moe",
    rules=(
        *(EMBEDDING_RULE, *ATTENTION, qkv("bias"), *QK_NORM, *MLP),
        *(ROUTER, EXPERT_BIAS, *EXPERTS, *shared_expert("shared_experts"), *HEAD),
    ),
    qkv_bias_key="attention_bias",
)
