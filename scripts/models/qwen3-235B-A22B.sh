# shellcheck shell=bash disable=SC2034
# Qwen/Qwen3-235B-A22B
MODEL_ARGS=(
   --num-layers 94
   --hidden-size 4096
   --ffn-hidden-size 12288
   --num-attention-heads 64
   --num-query-groups 4
   --kv-channels 128
   --vocab-size 151936
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --rotary-percent 1.0
   --norm-epsilon 1e-6
   --qk-layernorm
   --num-experts 128
   --moe-router-topk 8
   --moe-ffn-hidden-size 1536
   --moe-layer-freq "[1]*94"
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
