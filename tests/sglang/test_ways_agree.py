"""Whole runs of ``train.py`` with SGLang: whichever way the weights take, training is the same.

The engines decode greedily, since SGLang on a CPU has no seed per request; samples of a prompt differ by a suffix.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.commands import arguments, assert_nothing_left, make_inputs, series
from tests.sglang.test_train import train

pytestmark = pytest.mark.timeout(600)

GREEDY = """
from slime.rollout.generate import generate as generate_one


async def generate(args, sample, sampling_params, evaluation=False):
    sample.prompt = f"{sample.prompt} {sample.index % args.n_samples_per_prompt}"
    return await generate_one(args, sample, {**sampling_params, "temperature": 0.0})
"""
NUM_ROLLOUT = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "greedy.py").write_text(GREEDY)
    return make_inputs(folder)


def numbers(inputs: dict[str, Path], folder: Path, *extra: str) -> list[float]:
    """Losses and gradient norms of all rollouts, after checks that hold for every way."""
    argv = [*arguments(inputs, folder / "out", NUM_ROLLOUT), "--rollout-num-gpus", "2"]
    argv += [
        "--custom-generate-function-path",
        f"{inputs['model'].parent / 'greedy.py'}:generate",
        "--precision",
        "fp32",
    ]
    result = train([*argv, *extra])
    assert result.returncode == 0, result.stdout + result.stderr
    assert_nothing_left(str(folder))
    versions = [series(folder / "out", f"rollout/weight_version/{end}") for end in ("min", "max")]
    assert versions == [[1.0, 2.0, 3.0]] * 2
    assert series(folder / "out", "perf/update_weights_unverified") == [0.0] * NUM_ROLLOUT
    norms = series(folder / "out", "train/grad_norm")
    assert all(norm > 0 for norm in norms)
    return series(folder / "out", "train/loss") + norms


@pytest.fixture(scope="module")
def by_tensors(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return numbers(inputs, tmp_path_factory.mktemp("tensors"), "--check-weight-update-equal")


def test_by_broadcast(inputs: dict[str, Path], by_tensors: list[float], tmp_path: Path) -> None:
    found = numbers(inputs, tmp_path, "--update-weight-transport", "broadcast")
    assert found == pytest.approx(by_tensors, abs=1e-6)


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_through_files(inputs: dict[str, Path], by_tensors: list[float], tmp_path: Path, mode: str) -> None:
    flags = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path / "shared")]
    if mode == "delta":
        flags += ["--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", str(tmp_path / "local")]
    assert numbers(inputs, tmp_path, *flags) == pytest.approx(by_tensors, abs=1e-6)
