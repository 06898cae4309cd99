#!/usr/bin/env bash
# Make .venv and install the pinned dependencies. Safe to repeat and to interrupt: a finished set-up of the
# same pins is recognised in milliseconds, an unfinished one is continued.
#
#   scripts/setup.sh         what training needs
#   scripts/setup.sh dev     and what the tests and the style checks need
#   scripts/setup.sh sglang  a separate .venv-sglang with SGLang: for production on GPUs, for tests on a CPU
#   scripts/setup.sh trl     a separate .venv-trl with TRL, for bench/grpo_vs_trl.py
#
# Environment: PYTHON (interpreter to use), VENV (folder, .venv), PLATFORM (cpu or cuda; found out when unset).
set -euo pipefail
cd "$(dirname "$0")/.."

readonly MEGATRON="megatron-core==0.19.2"

fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; set PYTHON=/path/to/python3"
}

find_platform() {
    if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then
        echo cuda
    else
        echo cpu
    fi
}

profile=${1:-run}
platform=${PLATFORM:-$(find_platform)}
[[ $platform == cpu || $platform == cuda ]] || fail "PLATFORM is '$platform'; accepted: cpu, cuda"
case $profile in
run) venv=${VENV:-.venv} pins=("requirements/$platform.txt") ;;
dev) venv=${VENV:-.venv} pins=("requirements/$platform.txt" requirements/dev.txt) ;;
sglang)
    venv=${VENV:-.venv-sglang}
    if [[ $platform == cuda ]]; then pins=(requirements/cuda-sglang.txt); else pins=(requirements/{cpu,dev,sglang-cpu}.txt); fi
    ;;
trl) venv=${VENV:-.venv-trl} pins=(requirements/bench.txt) ;;
*) fail "unknown profile '$profile'; accepted: run, dev, sglang, trl" ;;
esac

# One stamp per profile: its name is a digest of everything that decides what is installed.
digest=$(cat "${pins[@]}" requirements.txt pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)
stamp=$venv/.installed-$profile-$digest
[[ -e $stamp ]] && exit 0

started=$SECONDS
if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "setup: $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Modules are compiled at first import: compiling all of them here would take a minute.
pip() { "$venv/bin/python" -m pip install --quiet --no-compile "$@"; }

echo "setup: installing $(cat "${pins[@]}" | grep -c '==') pinned packages ($platform) ..."
requirements=() alone=()
for file in "${pins[@]}"; do
    case $file in
    */sglang-cpu.txt) alone+=(-r "$file") ;;
    *) requirements+=(-r "$file") ;;
    esac
done
pip "${requirements[@]}"
((${#alone[@]} == 0)) || pip --no-deps "${alone[@]}"

if [[ $profile != trl ]]; then
    # Wheels for 3.11 are published, but their metadata asks for 3.12. requirements.txt cannot say so for one package.
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
        pip --no-deps --ignore-requires-python "$MEGATRON"
    fi
    pip --no-deps --no-build-isolation --editable .
fi

rm -f "$venv/.installed-$profile-"*
touch "$stamp"
echo "setup: $venv is ready after $((SECONDS - started)) s"
