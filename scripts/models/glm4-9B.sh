# shellcheck shell=bash disable=SC2034
# THUDM/GLM-Z1-9B-0414, THUDM/GLM-4-9B-0414
MODEL_ARGS=(
   --swiglu
   --num-layers 40
   --hidden-size 4096
   --ffn-hidden-size 13696
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 2
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --rotary-base 10000
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --add-qkv-bias
   --post-self-attn-layernorm
   --post-mlp-layernorm
   --rotary-interleaved
   --rotary-percent 0.5
   --no-rope-fusion
   --spec slime_plugins.models.glm4 get_glm_spec
)
