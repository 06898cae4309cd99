"""``scripts/models/*.sh``: sourced by bash, flags known, and the sizes give the parameters their names promise."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from slime.config.megatron_flags import MEGATRON_FLAGS
from slime.config.rules.availability import UNAVAILABLE_MODEL_FLAGS
from slime.config.schema import all_flag_specs

SCRIPTS = Path(__file__).parents[3] / "scripts" / "models"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.sh"))
DENSE = [n for n in NAMES if n.startswith(("qwen2.5", "qwen3", "llama")) and not re.search(r"-A\d+B", n)]


def model_args(name: str, **environment: str) -> list[str]:
    command = f'set -eu; source "{SCRIPTS / name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    env = {"PATH": "/usr/bin:/bin", **environment}
    result = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=10, check=True)
    return result.stdout.splitlines()


def values(name: str) -> dict[str, str]:
    tokens = model_args(name)
    following = [*tokens[1:], "--"]
    return {t: ("" if n.startswith("--") else n) for t, n in zip(tokens, following, strict=True) if t.startswith("--")}


@pytest.mark.parametrize("name", NAMES)
def test_flags_are_known_and_given_once(name: str) -> None:
    known = MEGATRON_FLAGS | UNAVAILABLE_MODEL_FLAGS | {n for s in all_flag_specs() for n in s.names}
    flags = [token for token in model_args(name) if token.startswith("--")]
    assert set(flags) <= known
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("name", DENSE)
def test_sizes_give_the_parameters_of_the_name(name: str) -> None:
    args = values(name)
    num = {flag: int(text) for flag, text in args.items() if text.isdigit()}
    hidden, layers, heads = num["--hidden-size"], num["--num-layers"], num["--num-attention-heads"]
    width = num.get("--kv-channels", hidden // heads)
    attention = 2 * hidden * width * (heads + num["--num-query-groups"])
    tables = 2 if "--untie-embeddings-and-output-weights" in args else 1
    total = layers * (attention + 3 * hidden * num["--ffn-hidden-size"]) + tables * hidden * num["--vocab-size"]
    promised = re.search(r"-(\d+(?:\.\d+)?)B", name)
    assert promised is not None
    # Names round: Qwen2.5-0.5B has 0.49, Qwen2.5-3B 3.1, Llama-3.2-3B 3.2 and Qwen3-1.7B 1.7 billion.
    assert total / 1e9 == pytest.approx(float(promised[1]), rel=0.2)


def test_environment_overrides() -> None:
    assert "7" in model_args("qwen3-4B", MODEL_ARGS_ROTARY_BASE="7")
    assert "5000000" in model_args("qwen3-4B-Instruct-2507")
    assert "[0]*3+[1]*2" in model_args("deepseek-v3-5layer")
    assert "[0]*3+[1]*58" in model_args("deepseek-v3")
