"""``python train.py`` with weights through files: every way gives the losses of the tensors it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.commands import arguments, assert_nothing_left, make_inputs, run, series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HOOK = """
def after(args, version_dir, rollout_engines):
    with open(args.output_dir + "/versions", "a") as file:
        file.write(f"{version_dir} {len(rollout_engines)}\\n")
"""


def losses(inputs: dict[str, Path], folder: Path, *extra: str) -> list[float]:
    """Losses of three rollouts; the run leaves nothing behind."""
    log = folder / "log"
    assert run("train.py", arguments(inputs, folder / "out", 3, *extra), log) == 0, log.read_text()
    assert_nothing_left(str(folder))
    found = series(folder / "out", "train/loss") + series(folder / "out", "train/grad_norm")
    assert len(found) == 6
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(inputs, tmp_path_factory.mktemp("tensors"))


def test_deltas(inputs: dict[str, Path], expected: list[float], tmp_path: Path) -> None:
    disk, local = tmp_path / "shared", tmp_path / "local"
    flags = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(disk)]
    flags += ["--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", str(local)]
    assert losses(inputs, tmp_path, *flags) == pytest.approx(expected, abs=1e-6)
    assert sorted(path.name for path in disk.iterdir()) == [f"weight_v00000{i}" for i in range(1, 5)]
    assert not list((disk / "weight_v000001").glob("*.safetensors"))  # the engine began with these weights
    densities = series(tmp_path / "out", "perf/update_weights_density")
    assert all(0 < density <= 1 for density in densities)


def test_processes_that_end_while_engines_generate(
    inputs: dict[str, Path], expected: list[float], tmp_path: Path
) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    disk = tmp_path / "shared"
    flags = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(disk), "--release-train"]
    flags += ["--save", str(tmp_path / "ckpt"), "--keep-checkpoints", "1"]
    flags += ["--custom-update-weight-post-write-path", f"{tmp_path / 'hook.py'}:after"]
    assert losses(inputs, tmp_path, *flags) == pytest.approx(expected, abs=1e-6)
    versions = (tmp_path / "out" / "versions").read_text().split("\n")
    assert versions == [*(f"{disk}/weight_v00000{i} 1" for i in range(1, 5)), ""]
    assert list(disk.iterdir()) == []
    log = (tmp_path / "out" / "logs" / "trainer_0.log").read_text()
    assert log.count(" is process ") == 4  # at the start, and before each of the three steps
