"""An export appears whole or not at all, whatever moment it is killed at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from slime.errors import CheckpointError
from slime.weights.hf_files import HfWriter, weight_files
from tests.support.tiny_models import make_tiny_model


class Killed(BaseException):
    """What a test raises where a process would end: nothing catches it."""


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "template")


def export(out: Path, template: Path, value: float, *, shards: int = 2) -> None:
    writer = HfWriter(out, template)
    for i in range(shards):
        writer.write([(f"w{i}", torch.full((3,), value))])
    writer.finish()


def value_of(out: Path) -> float:
    """The one value that a complete export holds everywhere."""
    files = weight_files(out)
    assert set(files) == {"w0", "w1"}
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert (out / "tokenizer.json").is_file()
    values = set()
    for name, file in files.items():
        with safe_open(file, framework="pt") as tensors:
            values |= set(tensors.get_tensor(name).tolist())
    (value,) = values
    return value


def test_export_replaces_the_one_before(tmp_path: Path, template: Path) -> None:
    out = tmp_path / "hf"
    for value in (1.0, 2.0):
        export(out, template, value)
        assert value_of(out) == value
    assert {path.name for path in tmp_path.iterdir()} == {"template", "hf"}


def renames_of_an_export(tmp_path: Path, template: Path) -> int:
    """How many renames an export over an earlier one makes."""
    count = 0
    real = Path.replace

    def counted(path: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        return real(path, target)

    export(tmp_path / "counted", template, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", counted)
        export(tmp_path / "counted", template, 2.0)
    return count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_no_rename_at_which_it_is_killed_loses_the_last_export(tmp_path: Path, template: Path, after: bool) -> None:
    renames = renames_of_an_export(tmp_path, template)
    assert renames == 4  # two shards get their names, old out of the way, new into place
    for fatal in range(renames):
        out = tmp_path / f"hf{fatal}"
        export(out, template, 1.0)
        done = 0
        real = Path.replace

        def killed(path: Path, target: Path, *, fatal: int = fatal, real: Any = real) -> Path:
            nonlocal done
            if done > fatal:
                raise Killed  # a dead process renames nothing, also not while it cleans up
            done += 1
            if done - 1 < fatal:
                return real(path, target)
            if after:
                real(path, target)
            done += 1
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            with pytest.raises(Killed):
                export(out, template, 2.0)
        if out.exists():
            assert value_of(out) == (2.0 if fatal == renames - 1 and after else 1.0)
        HfWriter(out, template)  # the next export has begun, and is killed again: the last good one is there
        assert value_of(out) in (1.0, 2.0)
        export(out, template, 3.0)
        assert value_of(out) == 3.0
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(f".hf{fatal}.")]


def test_a_rename_that_fails_leaves_the_old_export(tmp_path: Path, template: Path) -> None:
    out = tmp_path / "hf"
    export(out, template, 1.0)
    real = Path.replace

    def failing(path: Path, target: Path) -> Path:
        if path.name.endswith(".incomplete"):
            raise OSError("no space left")
        return real(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", failing)
        with pytest.raises(CheckpointError, match="no space left"):
            export(out, template, 2.0)
    assert value_of(out) == 1.0


def test_unreadable_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        weight_files(tmp_path)
