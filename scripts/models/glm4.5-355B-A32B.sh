# shellcheck shell=bash disable=SC2034
# zai-org/GLM-4.5, GLM-4.6, GLM-4.7
MODEL_ARGS=(
   --num-layers 92
   --hidden-size 5120
   --ffn-hidden-size 12288
   --num-attention-heads 96
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 151552
   --rotary-base 1000000
   --rotary-percent 0.5
   --add-qkv-bias
   --qk-layernorm
   --num-experts 160
   --moe-layer-freq "[0]*3+[1]*89"
   --moe-ffn-hidden-size 1536
   --moe-shared-expert-intermediate-size 1536
   --moe-router-topk 8
   --moe-router-topk-scaling-factor 2.5
   --moe-router-pre-softmax
   --moe-router-score-function sigmoid
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
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
