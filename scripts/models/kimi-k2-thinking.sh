# shellcheck shell=bash source-path=SCRIPTDIR disable=SC2034
# moonshotai/Kimi-K2-Thinking
MODEL_ARGS_NORM_EPSILON=1e-5
MODEL_ARGS_ROTARY_SCALING_FACTOR=64
source "$(dirname -- "${BASH_SOURCE[0]}")/kimi-k2.sh"
