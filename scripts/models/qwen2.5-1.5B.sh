# shellcheck shell=bash disable=SC2034
# Qwen/Qwen2.5-Math-1.5B, deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B (base models: MODEL_ARGS_ROTARY_BASE=1000000)
MODEL_ARGS=(
   --swiglu
   --num-layers 28
   --hidden-size 1536
   --ffn-hidden-size 8960
   --num-attention-heads 12
   --group-query-attention
   --num-query-groups 2
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}"
   --vocab-size 151936
   --add-qkv-bias
)
