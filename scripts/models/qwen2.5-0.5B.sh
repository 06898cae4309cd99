# shellcheck shell=bash disable=SC2034
# Qwen/Qwen2.5-0.5B, Qwen/Qwen2.5-0.5B-Instruct
MODEL_ARGS=(
   --swiglu
   --num-layers 24
   --hidden-size 896
   --ffn-hidden-size 4864
   --num-attention-heads 14
   --group-query-attention
   --num-query-groups 2
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --rotary-base 1000000
   --vocab-size 151936
   --add-qkv-bias
)
