"""Qwen3, dense and mixture of experts: query and key heads are normalised."""

from slime.weights.families.dense import ATTENTION, EMBEDDING_RULE, HEAD, MLP, QK_NORM
from slime.weights.families.experts import EXPERTS, ROUTER
from slime.weights.families.family import Family

QWEN3 = Family(model_type="qwen3", rules=(EMBEDDING_RULE, *ATTENTION, *QK_NORM, *MLP, *HEAD), qk_norm=True)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    rules=(EMBEDDING_RULE, *ATTENTION, *QK_NORM, *MLP, ROUTER, *EXPERTS, *HEAD),
    qk_norm=True,
)
