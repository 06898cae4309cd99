#!/usr/bin/env bash
# GRPO on SmolLM2-135M-Instruct, on this machine: the model learns to name the larger of two numbers.
#
#   examples/quickstart/run.sh [more flags for train.py]
#
# Environment: SEED (1), OUTPUT (outputs/quickstart/seed-$SEED), MODEL, DATA, PYTHON, OMP_NUM_THREADS (all cores),
# DYNAMIC_SAMPLING (1; 0 trains on every group, also on those that teach nothing).
# Started again after an interruption it goes on from the last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/../.."

SEED=${SEED:-1}
OUTPUT=${OUTPUT:-outputs/quickstart/seed-$SEED}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
DATA=${DATA:-data/quickstart}
PYTHON=${PYTHON:-.venv/bin/python}

if [[ -e $OUTPUT/done && $# -eq 0 ]]; then
    "$PYTHON" examples/quickstart/result.py "$OUTPUT"
    echo "This run is complete. Another seed: make quickstart SEED=$((SEED + 1)). Again from the start: remove $OUTPUT."
    echo "Longer: examples/quickstart/run.sh --num-rollout 80."
    exit 0
fi

"$PYTHON" -m tools.fetch_smollm2 --output "$MODEL"
[[ -e $DATA/train.jsonl && -e $DATA/eval.jsonl ]] || "$PYTHON" -m tools.generate_comparison_data --output "$DATA"

# bf16 arithmetic pays where the processor has instructions for it; the optimizer keeps fp32 weights either way.
PRECISION=(--precision fp32)
if grep -q -E -w 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then
    PRECISION=(--precision bf16)
fi

# Rollout and training take turns, so each may use every core. glibc returns large freed blocks to the system and
# faults them in again at every step; keeping them saves a quarter of a step on a CPU.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
export OMP_NUM_THREADS
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

MODEL_ARGS=(
    --hf-checkpoint "$MODEL"
    "${PRECISION[@]}"
)
CKPT_ARGS=(
    --load "$OUTPUT/checkpoints"
    --save "$OUTPUT/checkpoints"
    --save-interval 25
    --keep-checkpoints 1
    --save-hf "$OUTPUT/hf"
)
ROLLOUT_ARGS=(
    --prompt-data "$DATA/train.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --custom-rm-path examples/quickstart/reward.py
    --num-rollout 50
    --rollout-batch-size 8
    --n-samples-per-prompt 8
    --global-batch-size 64
    --use-dynamic-batch-size
    --max-tokens-per-gpu 2048
    --rollout-max-response-len 8
    --rollout-temperature 1.0
)
# A group whose answers all got the same reward has no gradient. A model that always names the first number makes
# nearly nothing else, and training would stay there: sample until 8 groups have both right and wrong answers.
if [[ ${DYNAMIC_SAMPLING:-1} == 1 ]]; then
    ROLLOUT_ARGS+=(
        --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
        --over-sampling-batch-size 16
    )
fi
LOG_ARGS=(
    --output-dir "$OUTPUT"
)
EVAL_ARGS=(
    --eval-interval 10
    --eval-prompt-data larger "$DATA/eval.jsonl"
    --eval-temperature 0
)
ALGORITHM_ARGS=(
    --advantage-estimator grpo
    --lr 1e-5
    --lr-decay-style constant
    --weight-decay 0
    --seed "$SEED"
    --rollout-seed "$SEED"
)

"$PYTHON" train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    --rollout-num-gpus 1 \
    "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${ALGORITHM_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
touch "$OUTPUT/done"
"$PYTHON" examples/quickstart/result.py "$OUTPUT"
