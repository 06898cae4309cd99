"""Every rule of on-policy distillation by its effect on a parsed command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config.rules.checkpoints import TRACKER_FILE
from slime.config.rules.distillation import TEACHER_POST_PROCESS, TEACHER_REWARD

from .conftest import QWEN3, Run, write_model

Problems = Callable[..., list[str]]

ASKED = f"--custom-rm-path {TEACHER_REWARD} --custom-reward-post-process-path {TEACHER_POST_PROCESS}"
SERVER = f"--use-opd --opd-type sglang {ASKED} --rm-url http://localhost:1/generate"


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return write_model(tmp_path / "teacher")


def test_a_teacher_of_each_kind_is_accepted(run: Run, teacher: Path, tmp_path: Path) -> None:
    config = run(f"--use-opd --opd-type megatron --opd-teacher-load {teacher} --opd-kl-coef 0.5")
    assert (config.algorithm.opd_type, config.algorithm.opd_teacher_load) == ("megatron", str(teacher))
    assert config.algorithm.opd_kl_coef == 0.5
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "iter_0000007").mkdir(parents=True)
    (checkpoint / TRACKER_FILE).write_text("7")
    config = run(f"--use-opd --opd-type megatron --opd-teacher-load {checkpoint} --opd-teacher-ckpt-step 7")
    assert config.algorithm.opd_teacher_ckpt_step == 7
    assert run(SERVER).reward.rm_url == "http://localhost:1/generate"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--use-opd", ["--use-opd needs --opd-type"]),
        ("--use-opd --opd-type megatron", ["needs --opd-teacher-load"]),
        (
            "--use-opd --opd-type megatron --opd-teacher-load nowhere",
            ["--opd-teacher-load nowhere", "no such directory"],
        ),
        ("--opd-teacher-load TEACHER", ["--opd-teacher-load needs --use-opd"]),
        (
            "--use-opd --opd-type megatron --opd-teacher-load TEACHER --opd-teacher-ckpt-step 3",
            ["--opd-teacher-ckpt-step 3", "no Megatron checkpoint"],
        ),
        (f"{SERVER} --opd-teacher-load TEACHER", ["--opd-type sglang excludes --opd-teacher-load"]),
        (f"{SERVER} --opd-teacher-ckpt-step 3", ["--opd-type sglang excludes --opd-teacher-ckpt-step"]),
        (f"--use-opd --opd-type sglang {ASKED}", ["needs --rm-url", "/generate"]),
        ("--use-opd --opd-type sglang", ["nothing sets the teacher's log-probs", TEACHER_REWARD, TEACHER_POST_PROCESS]),
        (
            f"--use-opd --opd-type sglang --custom-rm-path {TEACHER_REWARD} --rm-url http://localhost:1",
            ["nothing sets the teacher's log-probs"],
        ),
        (f"{SERVER} --loss-type sft_loss", ["--use-opd changes the advantages", "--loss-type sft_loss"]),
        (
            f"{SERVER} --disable-compute-advantages-and-returns",
            ["--use-opd changes the advantages", "--disable-compute-advantages-and-returns"],
        ),
    ],
)
def test_faults(problems: Problems, teacher: Path, flags: str, words: list[str]) -> None:
    (problem,) = problems(flags.replace("TEACHER", str(teacher)))
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers 3 (student: 2)"),
        ({"rope_theta": 10000}, "rope_theta 10000 (student: 1000000)"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 (student: 1e-06)"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False (student: True)"),
        ({"model_type": "qwen2"}, "model_type qwen2 (student: qwen3)"),
        ({"num_experts": 4}, "num_experts 4 (student: None)"),
        ({"kv_lora_rank": 16}, "kv_lora_rank 16 (student: None)"),
    ],
)
def test_the_trainers_teacher_must_have_the_students_shape(
    problems: Problems, tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    teacher = write_model(tmp_path / "teacher", {**QWEN3, **change})
    (problem,) = problems(f"--use-opd --opd-type megatron --opd-teacher-load {teacher}")
    assert word in problem
    assert "--opd-type sglang" in problem


def test_own_functions_may_set_the_log_probs(run: Run, tmp_path: Path) -> None:
    assert run("--use-opd --opd-type sglang --custom-rm-path mine.py:reward").algorithm.use_opd
    assert run("--use-opd --opd-type sglang --custom-generate-function-path mine.py:generate").algorithm.use_opd


def test_flags_without_effect_are_noticed(run: Run) -> None:
    config = run("--opd-type sglang --opd-kl-coef 2")
    assert "--opd-type has no effect without --use-opd" in config.notices
    assert "--opd-kl-coef has no effect without --use-opd" in config.notices
