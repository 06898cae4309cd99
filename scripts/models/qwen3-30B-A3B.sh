# shellcheck shell=bash disable=SC2034
# Qwen/Qwen3-30B-A3B
MODEL_ARGS=(
   --num-layers 48
   --hidden-size 2048
   --ffn-hidden-size 6144
   --num-attention-heads 32
   --num-query-groups 4
   --kv-channels 128
   --vocab-size 151936
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --rotary-percent 1.0
   --norm-epsilon 1e-6
   --qk-layernorm
   --num-experts 128
   --moe-router-topk 8
   --moe-ffn-hidden-size 768
   --moe-layer-freq "[1]*48"
   --moe-router-score-function softmax
   --moe-token-drop-policy probs
   --disable-bias-linear
   --group-query-attention
   --normalization RMSNorm
   --position-embedding-type rope
   --swiglu
   --untie-embeddings-and-output-weights
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-router-dtype fp32
   --moe-permute-fusion
   --moe-aux-loss-coeff 0
)
