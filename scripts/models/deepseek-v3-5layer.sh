# shellcheck shell=bash source-path=SCRIPTDIR disable=SC2034
# The first 5 layers of DeepSeek-V3, for tests
MODEL_ARGS_NUM_LAYERS=5
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
