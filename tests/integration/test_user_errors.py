"""A user's mistakes, through the real ``python train.py``: a clear message, exit code 2, quickly, nothing left."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cli import LazyMegatronFamily
from slime.config.megatron_flags import MEGATRON_FLAGS

ROOT = Path(__file__).parents[2]
CPU_SECONDS = 10.0
"""Bound on the work from the command to its message, imports included. It is processor time, because the elapsed
time depends on what else the machine does."""

pytestmark = pytest.mark.timeout(120)


def write_model(folder: Path) -> Path:
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1000000,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))
    return folder


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    write_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n' * 40)
    text = """
        --hf-checkpoint model --prompt-data data.jsonl --input-key prompt --label-key label --rm-type math
        --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --rollout-batch-size 4 --n-samples-per-prompt 8
        --global-batch-size 32 --num-rollout 3 --rollout-max-response-len 16
    """
    return text.split()


def run(flags: list[str], folder: Path) -> tuple[int, str, str, float]:
    """Run train.py in a process group of its own; fail if any process of it is left afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *flags],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, output, errors, seconds


MISTAKES = {
    "misspelt flag": (["--rolout-seed", "3"], ["unknown flag --rolout-seed", "--rollout-seed"]),
    "missing file": (["--prompt-data", "dat.jsonl"], ["--prompt-data dat.jsonl", "no such file", "data.jsonl"]),
    "bad JSON line": (["--prompt-data", "bad.jsonl"], ["bad.jsonl", "3"]),
    "missing label column": (["--label-key", "answer"], ["data.jsonl", "answer", "--label-key"]),
    "batch identity": (["--global-batch-size", "24"], ["--global-batch-size 24", "--rollout-batch-size 4", "32"]),
    "unknown grader": (["--rm-type", "mahts"], ["--rm-type mahts", "did you mean math?", "deepscaler"]),
    "unreadable model": (["--hf-checkpoint", "broken"], ["--hf-checkpoint broken", "config.json is not JSON"]),
    "absent model": (["--hf-checkpoint", "nowhere"], ["--hf-checkpoint nowhere", "no such directory"]),
    "absent plug-in": (["--custom-rm-path", "reward.py"], ["--custom-rm-path reward.py", "no such file"]),
    "unavailable feature": (
        ["--max-weight-staleness", "1"],
        ["--max-weight-staleness", "not available in this version"],
    ),
    "teacher without address": (
        ["--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "nowhere"],
        ["--opd-teacher-load nowhere", "no such directory"],
    ),
    "engine without the feature": (
        ["--sglang-quantization", "fp8", "--sglang-enable-metrics"],
        ["--sglang-quantization fp8", "embedded engine"],
    ),
    "unknown placeholder": (["--save-hf", "hf/{step}"], ["--save-hf hf/{step}", "{rollout_id}"]),
    "Megatron value": (["--hidden-size", "64"], ["--hidden-size", "32"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(command: list[str], tmp_path: Path, name: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 2 + '{"prompt": "a",\n')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    flags, words = MISTAKES[name]
    code, output, errors, seconds = run([*command, *flags], tmp_path)
    assert code == 2, errors
    assert output == ""
    assert "Traceback" not in errors
    assert "nothing was started" in errors
    assert [word for word in words if word not in errors] == []
    assert seconds < CPU_SECONDS
    assert not (tmp_path / "outputs").exists()


def test_the_shipped_corrections_are_accepted(command: list[str], tmp_path: Path) -> None:
    flags = ["--use-tis", "--custom-tis-function-path", "slime.backends.megatron_utils.loss.icepop_function"]
    code, output, errors, _ = run([*command, *flags, "--dry-run"], tmp_path)
    assert code == 0, errors
    assert "Processes" in output


def test_all_mistakes_of_a_command_line_are_reported_together(command: list[str], tmp_path: Path) -> None:
    flags = (
        "--rolout-seed 3 --rm-type mahts --global-batch-size 24 --hf-checkpoint nowhere --lr fast --label-key answer"
    )
    code, _, errors, _ = run([*command, *flags.split()], tmp_path)
    assert code == 2
    for word in ("--rolout-seed", "mahts", "--global-batch-size 24", "--hf-checkpoint nowhere", "--lr", "answer"):
        assert word in errors, word


def test_dry_run_prints_the_plan_and_starts_nothing(command: list[str], tmp_path: Path) -> None:
    code, output, errors, _ = run([*command, "--dry-run"], tmp_path)
    assert (code, errors) == (0, "")
    assert "trainer: 2" in output
    assert "32 samples per rollout" in output
    assert not (tmp_path / "outputs").exists()


def test_help(tmp_path: Path) -> None:
    code, output, _, seconds = run(["--help"], tmp_path)
    assert code == 0
    assert "--rollout-batch-size" in output
    assert seconds < CPU_SECONDS


def test_recorded_megatron_names_are_those_of_the_installed_parser() -> None:
    family = LazyMegatronFamily()
    installed = {name for name in family.load().flag_names() if name.startswith("--")}
    assert installed == MEGATRON_FLAGS
