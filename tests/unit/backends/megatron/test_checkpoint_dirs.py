"""Directories of checkpoints: whatever moment a save dies at, the tracker names a complete one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime.backends.megatron import checkpoint_dirs as dirs
from slime.config import CheckpointConfig, Config, RolloutConfig
from slime.config.hf import HfModel
from slime.errors import CheckpointError
from tests.support.checkpoints import with_start_settled


def save(root: Path, iteration: int, text: str, *, keep: int | None = None) -> None:
    target = dirs.begin_save(root, iteration)
    (target / "metadata.json").write_text(text)
    dirs.finish_save(root, iteration, keep=keep)


def config_with(path: Path | None = None, *, hf: Path | None = None, ref: Path | None = None) -> Config:
    """A settled configuration; ``path`` is also where the run saves."""
    base = Config(
        hf=None if hf is None else HfModel(path=str(hf), config={}, model_type="llama"),
        rollout=RolloutConfig(hf_checkpoint=None if hf is None else str(hf)),
    )
    load = None if path is None else str(path)
    texts = {"load": load, "save": load, "ref_load": None if ref is None else str(ref)}
    return with_start_settled(replace(base, checkpoint=replace(base.checkpoint, **texts)))


def good(root: Path) -> str:
    """Content of the checkpoint that a run would resume."""
    point = dirs.start_point(config_with(root))
    assert point.resume
    return (point.path / "metadata.json").read_text()


class Killed(BaseException):
    pass


class Fuse:
    """Lets some renames pass and dies at the next."""

    def __init__(self, length: int) -> None:
        self.left = length

    def around(self, original: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def step(path: Path, target: Path) -> Path:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return original(path, target)

        return step


@pytest.mark.parametrize("fatal", range(6))
@pytest.mark.parametrize("iteration", [1, 2])
def test_killed_at_any_rename_the_last_good_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int, fatal: int
) -> None:
    save(tmp_path, 1, "first")
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        fuse = Fuse(fatal)
        for name in ("rename", "replace"):
            patch.setattr(Path, name, fuse.around(getattr(Path, name)))
        save(tmp_path, iteration, "second", keep=1)
    assert good(tmp_path) in ("first", "second")
    save(tmp_path, 3, "third", keep=1)
    assert good(tmp_path) == "third"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", dirs.TRACKER]


def test_keep_counts_the_new_one(tmp_path: Path) -> None:
    for i in range(5):
        save(tmp_path, i, str(i), keep=3)
    assert dirs.saved_iterations(tmp_path) == [2, 3, 4]


def test_start_falls_back_from_load_to_reference_to_hf(tmp_path: Path) -> None:
    hf, ref, empty = tmp_path / "hf", tmp_path / "ref", tmp_path / "empty"
    hf.mkdir()
    (hf / "config.json").write_text('{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}')
    empty.mkdir()
    save(ref, 7, "ref")
    assert dirs.start_point(config_with(empty, hf=hf)) == dirs.StartPoint(kind="hf", path=hf)
    assert dirs.start_point(config_with(tmp_path / "missing", hf=hf)).path == hf
    found = dirs.start_point(config_with(empty, hf=hf, ref=ref))
    assert (found.kind, found.iteration, found.resume) == ("megatron", 7, False)
    assert dirs.start_point(config_with(ref)).resume
    assert dirs.start_point(config_with(hf)) == dirs.StartPoint(kind="hf", path=hf)


def test_release_checkpoints_start_afresh(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "metadata.json").write_text("{}")
    (tmp_path / dirs.TRACKER).write_text("release")
    found = dirs.start_point(config_with(tmp_path))
    assert (found.path.name, found.iteration, found.resume) == ("release", None, False)


@pytest.mark.parametrize(("tracker", "names"), [("9", "iter_0000009 is missing"), ("x", "expected a number")])
def test_a_broken_tracker_says_what_there_is(tmp_path: Path, tracker: str, names: str) -> None:
    save(tmp_path, 4, "four")
    (tmp_path / dirs.TRACKER).write_text(tracker)
    with pytest.raises(CheckpointError, match=names):
        dirs.start_point(config_with(tmp_path))


def test_nothing_to_start_from_names_the_flags(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--hf-checkpoint"):
        dirs.start_point(config_with())
    with pytest.raises(CheckpointError, match="--ref-load"):
        dirs.reference_point(Config(checkpoint=CheckpointConfig(ref_load=str(tmp_path))))
    with pytest.raises(CheckpointError, match="--load"):
        dirs.start_point(Config(checkpoint=CheckpointConfig(load=str(tmp_path))))
