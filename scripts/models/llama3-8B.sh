# shellcheck shell=bash disable=SC2034
# meta-llama/Meta-Llama-3-8B, meta-llama/Meta-Llama-3-8B-Instruct
MODEL_ARGS=(
   --swiglu
   --num-layers 32
   --hidden-size 4096
   --ffn-hidden-size 14336
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --rotary-base 500000
   --vocab-size 128256
   --untie-embeddings-and-output-weights
   --max-position-embeddings 8192
)
