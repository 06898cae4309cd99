# shellcheck shell=bash source-path=SCRIPTDIR disable=SC2034
# The first 20 layers of DeepSeek-V3, for tests
MODEL_ARGS_NUM_LAYERS=20
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
