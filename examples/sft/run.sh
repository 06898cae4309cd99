#!/usr/bin/env bash
# Supervised fine-tuning of SmolLM2-135M-Instruct, on this machine: conversations that name the larger of two numbers.
#
#   examples/sft/run.sh [more flags for train_async.py]
#
# Environment: OUTPUT (outputs/sft), MODEL, DATA (the quickstart's), PYTHON, OMP_NUM_THREADS (all cores).
set -euo pipefail
cd "$(dirname "$0")/../.."

OUTPUT=${OUTPUT:-outputs/sft}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
DATA=${DATA:-data/quickstart}
PYTHON=${PYTHON:-.venv/bin/python}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
export OMP_NUM_THREADS
# Keep freed memory in the process: glibc would return it and fault it in again at every step.
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

"$PYTHON" -m tools.fetch_smollm2 --output "$MODEL"
[[ -e $DATA/train.jsonl && -e $DATA/eval.jsonl ]] || "$PYTHON" -m tools.generate_comparison_data --output "$DATA"
"$PYTHON" -m examples.sft.make_data --input "$DATA" --output "$OUTPUT/data"

SFT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --prompt-data "$OUTPUT/data/train.jsonl@[0:640]"
    --input-key messages
    --rollout-shuffle
    --num-epoch 1
    --rollout-batch-size 32
    --global-batch-size 32
    --loss-type sft_loss
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
    --use-dynamic-batch-size
    --max-tokens-per-gpu 2048
)
OPTIMIZER_ARGS=(
    --lr 1e-5
    --lr-decay-style cosine
    --min-lr 1e-6
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
)

"$PYTHON" train_async.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    --hf-checkpoint "$MODEL" \
    --precision fp32 \
    --save-hf "$OUTPUT/hf" \
    --output-dir "$OUTPUT" \
    "${SFT_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
"$PYTHON" -m examples.sft.result "$OUTPUT/data/eval.jsonl" "$MODEL" "$OUTPUT/hf"
