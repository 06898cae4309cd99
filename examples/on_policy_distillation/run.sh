#!/usr/bin/env bash
# On-policy distillation on this machine: SmolLM2-135M-Instruct learns from a copy that was fine-tuned by examples/sft.
#
#   examples/on_policy_distillation/run.sh [more flags for train.py]
#
# Environment: TEACHER_TYPE (megatron, or sglang: an engine process behind an address), TEACHER (outputs/sft/hf),
# TEACHER_PORT (13141), OUTPUT (outputs/distillation-$TEACHER_TYPE), MODEL, DATA, PYTHON, OMP_NUM_THREADS (all cores).
set -euo pipefail
cd "$(dirname "$0")/../.."

TEACHER_TYPE=${TEACHER_TYPE:-megatron}
TEACHER=${TEACHER:-outputs/sft/hf}
TEACHER_PORT=${TEACHER_PORT:-13141}
OUTPUT=${OUTPUT:-outputs/distillation-$TEACHER_TYPE}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
DATA=${DATA:-data/quickstart}
PYTHON=${PYTHON:-.venv/bin/python}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
export OMP_NUM_THREADS
# Keep freed memory in the process: glibc would return it and fault it in again at every step.
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

if [[ ! -e $TEACHER/config.json ]]; then
    echo "no teacher at $TEACHER; examples/sft/run.sh makes one" >&2
    exit 2
fi
"$PYTHON" -m tools.fetch_smollm2 --output "$MODEL"
[[ -e $DATA/train.jsonl && -e $DATA/eval.jsonl ]] || "$PYTHON" -m tools.generate_comparison_data --output "$DATA"

REWARDS=examples/on_policy_distillation/rewards.py
OPD_ARGS=(
    --use-opd
    --opd-type "$TEACHER_TYPE"
    --opd-kl-coef 1.0
    --custom-reward-post-process-path "$REWARDS:only_teacher"
)
if [[ $TEACHER_TYPE == sglang ]]; then
    "$PYTHON" -m slime.engines.server --model-path "$TEACHER" --host 127.0.0.1 --port "$TEACHER_PORT" --device cpu &
    SERVER=$!
    trap 'kill "$SERVER" 2>/dev/null || true' EXIT
    # Up to two minutes; the server's own message says why if it ends.
    for _ in $(seq 240); do
        "$PYTHON" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$TEACHER_PORT/ready', timeout=2)" \
            2>/dev/null && break
        kill -0 "$SERVER"
        sleep 0.5
    done
    OPD_ARGS+=(
        --rm-url "http://127.0.0.1:$TEACHER_PORT/generate"
        --custom-rm-path "$REWARDS:task_and_teacher"
        --reward-key score
    )
else
    OPD_ARGS+=(
        --opd-teacher-load "$TEACHER"
        --custom-rm-path "$REWARDS:task"
    )
fi

ROLLOUT_ARGS=(
    --prompt-data "$DATA/train.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --num-rollout 20
    --rollout-batch-size 16
    --n-samples-per-prompt 2
    --global-batch-size 32
    --use-dynamic-batch-size
    --max-tokens-per-gpu 2048
    --rollout-max-response-len 8
    --rollout-temperature 1.0
)
EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data larger "$DATA/eval.jsonl"
    --eval-custom-rm-path "$REWARDS:task"
    --eval-temperature 0
)
OPTIMIZER_ARGS=(
    --lr 1e-5
    --lr-decay-style constant
    --weight-decay 0
)

"$PYTHON" train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    --rollout-num-gpus 1 \
    --hf-checkpoint "$MODEL" \
    --precision fp32 \
    --output-dir "$OUTPUT" \
    "${OPD_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
"$PYTHON" -m examples.on_policy_distillation.result "$OUTPUT"
