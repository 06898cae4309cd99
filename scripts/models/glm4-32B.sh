# shellcheck shell=bash disable=SC2034
# THUDM/GLM-Z1-32B-0414
MODEL_ARGS=(
   --swiglu
   --num-layers 64
   --hidden-size 6144
   --ffn-hidden-size 23040
   --num-attention-heads 48
   --group-query-attention
   --num-query-groups 8
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --rotary-base 10000
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --post-self-attn-layernorm
   --post-mlp-layernorm
   --rotary-interleaved
   --rotary-percent 0.5
   --no-rope-fusion
   --max-position-embeddings 32768
   --seq-length 32768
   --spec slime_plugins.models.glm4 get_glm_spec
)
