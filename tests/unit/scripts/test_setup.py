"""The set-up script refuses what it cannot do, by name, and recognises finished work."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh"), *arguments],
        env={**os.environ, "PLATFORM": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["everything"], {}, "unknown profile 'everything'; accepted: run, dev, sglang, trl"),
        (["run"], {"PLATFORM": "tpu"}, "PLATFORM is 'tpu'; accepted: cpu, cuda"),
    ],
)
def test_wrong_use_is_refused(tmp_path: Path, arguments: list[str], environment: dict[str, str], message: str) -> None:
    result = setup(*arguments, VENV=str(tmp_path / "venv"), **environment)
    assert result.returncode == 1
    assert message in result.stderr
    assert not (tmp_path / "venv").exists()


def test_old_python_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python2"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = setup("run", VENV=str(tmp_path / "venv"), PYTHON=str(old))
    assert result.returncode == 1
    assert "no Python 3.11 or newer found; set PYTHON" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_finished_setup_is_not_repeated(tmp_path: Path) -> None:
    inputs = ["requirements/cpu.txt", "requirements.txt", "pyproject.toml", "scripts/setup.sh"]
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in inputs)).hexdigest()[:16]
    (tmp_path / f".installed-run-{digest}").touch()
    result = setup("run", VENV=str(tmp_path), PYTHON="/nonexistent")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_every_requirement_is_pinned() -> None:
    names = [line.split(">=")[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if line[:1].isalpha()]
    for pins in ("cpu.txt", "cuda.txt", "cuda-sglang.txt"):
        lines = (ROOT / "requirements" / pins).read_text().splitlines()
        pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
        assert not {name.lower().replace("_", "-") for name in names} - pinned, pins


def test_pins_for_sglang_repeat_no_other_pin() -> None:
    def names(pins: str) -> list[str]:
        lines = (ROOT / "requirements" / pins).read_text().splitlines()
        return [line.split("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")]

    added = names("sglang-cpu.txt")
    assert {"sglang", "torchvision", "triton"} <= set(added)
    assert len(set(added)) == len(added)
    assert not set(added) & {*names("cpu.txt"), *names("dev.txt")}
