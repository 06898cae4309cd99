# shellcheck shell=bash disable=SC2034
# zai-org/GLM-4.5-Air
MODEL_ARGS=(
   --num-layers 46
   --hidden-size 4096
   --ffn-hidden-size 10944
   --num-attention-heads 96
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 151552
   --rotary-base 1000000
   --rotary-percent 0.5
   --add-qkv-bias
   --num-experts 128
   --moe-layer-freq "[0]*1+[1]*45"
   --moe-ffn-hidden-size 1408
   --moe-shared-expert-intermediate-size 1408
   --moe-router-topk 8
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
