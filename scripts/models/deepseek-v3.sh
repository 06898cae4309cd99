# shellcheck shell=bash disable=SC2034
# deepseek-ai/DeepSeek-V3, DeepSeek-V3.1, DeepSeek-R1; MODEL_ARGS_NUM_LAYERS cuts the model for tests
NUM_LAYERS="${MODEL_ARGS_NUM_LAYERS:-61}"
NUM_DENSE_LAYERS=3
MODEL_ARGS=(
   --num-layers "${NUM_LAYERS}"
   --hidden-size 7168
   --ffn-hidden-size 18432
   --num-attention-heads 128
   --kv-channels 128
   --vocab-size 129280
   --norm-epsilon 1e-6
   --rotary-base 10000
   --rotary-scaling-factor 40
   --mscale 1.0
   --mscale-all-dim 1.0
   --no-rope-fusion
   --attention-softmax-in-fp32
   --disable-bias-linear
   --normalization RMSNorm
   --position-embedding-type rope
   --swiglu
   --untie-embeddings-and-output-weights
   --multi-latent-attention
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --qk-layernorm
   --num-experts 256
   --moe-layer-freq "[0]*${NUM_DENSE_LAYERS}+[1]*$((NUM_LAYERS - NUM_DENSE_LAYERS))"
   --moe-ffn-hidden-size 2048
   --moe-shared-expert-intermediate-size 2048
   --moe-router-topk 8
   --moe-router-num-groups 8
   --moe-router-group-topk 4
   --moe-router-topk-scaling-factor 2.5
   --moe-router-pre-softmax
   --moe-router-score-function sigmoid
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
   --moe-grouped-gemm
   --moe-router-dtype fp32
   --moe-permute-fusion
   --moe-token-dispatcher-type alltoall
)
