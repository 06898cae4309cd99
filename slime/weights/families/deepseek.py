"""DeepSeek V3, V3.1 and R1, Moonlight, Kimi K2: multi-latent attention, mixture of experts."""

from slime.weights.families.dense import EMBEDDING_RULE, HEAD, MLP, layer_rule
from slime.weights.families.experts import EXPERT_BIAS, EXPERTS, ROUTER, shared_expert
from slime.weights.families.family import Family
from slime.weights.ops import Rename

_LATENT_ATTENTION = (
    layer_rule("input_layernorm.weight", "input_layernorm.weight", Rename()),
    layer_rule("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", Rename(split=0)),
    layer_rule("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", Rename()),
    layer_rule("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", Rename()),
    layer_rule("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", Rename()),
    layer_rule("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", Rename(split=0)),
    layer_rule("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", Rename()),
    layer_rule("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", Rename(split=0)),
    layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Rename(split=1)),
)
_RULES = (
    *(EMBEDDING_RULE, *_LATENT_ATTENTION, *MLP),
    *(ROUTER, EXPERT_BIAS, *EXPERTS, *shared_expert("shared_experts"), *HEAD),
)
DEEPSEEK_V3 = Family(model_type="deepseek_v3", rules=_RULES, latent_attention=True)
KIMI_K2 = Family(model_type="kimi_k2", rules=_RULES, latent_attention=True)
