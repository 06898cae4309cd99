"""Whole runs of ``train.py`` with SGLang as the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime.observability.tracking import read_metrics
from tests.e2e.commands import ROOT, arguments, environment, make_inputs
from tests.sglang.servers import shim_environment

pytestmark = pytest.mark.timeout(600)


def train(arguments: list[str], timeout_seconds: float = 560) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments, "--rollout-backend", "sglang"],
        cwd=ROOT,
        env=environment() | shim_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def test_trainer_and_two_servers_agree_after_every_update(tmp_path: Path) -> None:
    output = tmp_path / "run"
    argv = arguments(make_inputs(tmp_path / "inputs"), output, 3)
    result = train([*argv, "--rollout-num-gpus", "2", "--advantage-estimator", "grpo"])
    assert result.returncode == 0, result.stdout + result.stderr
    rows = read_metrics(output / "metrics.jsonl")
    differences = [row[name] for row in rows if (name := "train/train_rollout_logprob_abs_diff") in row]
    assert len(differences) == 3
    assert max(differences) <= 1e-5
    versions = [
        (row["rollout/weight_version/min"], row["rollout/weight_version/max"])
        for row in rows
        if "rollout/weight_version/min" in row
    ]
    assert versions == [(1, 1), (2, 2), (3, 3)]
    # Every rollout comes from weights that a step has moved: the agreement is no matter of standing still.
    assert all(row["train/grad_norm"] > 0 for row in rows if "train/grad_norm" in row)
    for engine in range(2):
        assert "POST /generate" in (output / "logs" / f"engine_{engine}.log").read_text()


def test_server_that_dies_at_its_start_ends_the_run_with_its_log(tmp_path: Path) -> None:
    argv = arguments(make_inputs(tmp_path / "inputs"), tmp_path / "run", 1)
    result = train([*argv, "--sglang-json-model-override-args", "{no json"])
    assert result.returncode != 0
    assert "engine 0 died (exit code 1)" in result.stderr
    assert "engine_0.log" in result.stderr
    assert "JSONDecodeError" in result.stderr
