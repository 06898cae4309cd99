"""The quickstart's own pieces: its reward, its result line and its script."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slime.types import Sample

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "reward"),
    [("82", 1.0), ("It is 82.", 1.0), ("37 or 82", 0.0), ("82 or 82", 0.0), ("37", 0.0), ("", 0.0), ("182", 0.0)],
)
async def test_reward_is_for_the_larger_number_and_no_other(response: str, reward: float) -> None:
    sample = Sample(prompt="37 or 82", response=response, label="82")
    assert await load("reward").custom_rm(None, sample) == reward


def write_metrics(directory: Path, scores: list[float]) -> None:
    rows: list[dict[str, float]] = [{"eval/step": i, "eval/larger": score} for i, score in enumerate(scores)]
    rows.insert(1, {"rollout/step": 0, "rollout/raw_reward": 0.5})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_result_compares_first_and_last_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path, [0.425, 0.7, 0.905])
    assert load("result").main([str(tmp_path), "--minimum-gain", "0.25"]) == 0
    assert capsys.readouterr().out == ("Held-out accuracy rose by 0.480: 0.425 before training, 0.905 after.\n")


def test_result_fails_below_the_minimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path, [0.5, 0.4])
    assert load("result").main([str(tmp_path), "--minimum-gain", "0"]) == 1
    assert "fell by 0.100" in capsys.readouterr().out
    assert load("result").main([str(tmp_path)]) == 0


def test_result_without_evaluations_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("result").main([str(tmp_path)]) == 2
    assert "does not hold two evaluations" in capsys.readouterr().err


def test_finished_run_is_shown_and_not_repeated(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.4, 0.9])
    (tmp_path / "done").touch()
    environment = {**os.environ, "OUTPUT": str(tmp_path), "PYTHON": sys.executable, "SEED": "7"}
    command = ["bash", str(QUICKSTART / "run.sh")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "rose by 0.500" in result.stdout
    assert "make quickstart SEED=8" in result.stdout
