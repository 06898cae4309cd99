# shellcheck shell=bash source-path=SCRIPTDIR disable=SC2034
# Qwen/Qwen3-4B-Instruct-2507
MODEL_ARGS_ROTARY_BASE=5000000
source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-4B.sh"
