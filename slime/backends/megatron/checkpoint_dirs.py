"""Checkpoints as directories: which exist, which is the newest, how one appears whole or not at all.

Owns names, the tracker file, the order of renames, and clean-up of what a killed save left. What a run
starts from is settled in the configuration and only looked up here. Knows nothing of their content.
Tests hold: whatever moment a save is killed at, the tracker names a complete checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slime.config import Config
from slime.errors import CheckpointError
from slime.files import force_tree_to_disk

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CONFIG_FILE = "slime_config.json"
_ITERATION = re.compile(r"iter_(\d{7,})$")
_LEFTOVER = re.compile(r"\.(iter_\d{7,})\.(saving|replaced|deleting)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """What a model's weights come from.

    Args:
        kind: A Megatron distributed checkpoint or a Hugging Face directory.
        path: The directory with the data.
        iteration: Rollout id of a Megatron checkpoint; None for a release checkpoint or Hugging Face.
        resume: Whether optimizer, schedule and random state are to be continued too.
    """

    kind: Literal["megatron", "hf"]
    path: Path
    iteration: int | None = None
    resume: bool = False


def iteration_dir(root: Path, iteration: int) -> Path:
    """Directory of one checkpoint."""
    return root / f"iter_{iteration:07d}"


def saved_iterations(root: Path) -> list[int]:
    """Rollout ids that have a directory, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(m[1]) for entry in root.iterdir() if (m := _ITERATION.fullmatch(entry.name)))


def is_megatron_dir(path: Path) -> bool:
    """Whether ``path`` holds Megatron checkpoints."""
    return (path / TRACKER).is_file()


def is_hf_dir(path: Path) -> bool:
    """Whether ``path`` is a Hugging Face model directory."""
    return (path / "config.json").is_file()


def start_point(config: Config) -> StartPoint:
    """Where the actor starts, as the configuration settled it: ``checkpoint.load`` and ``checkpoint.resume``.

    Raises:
        CheckpointError: It cannot be loaded, or a tracker names a checkpoint that is not there.
    """
    settings = config.checkpoint
    if settings.load is None:
        return reference_point(config)
    path = Path(settings.load)
    if is_megatron_dir(path):
        return replace(_megatron_point(path, settings.ckpt_step, flag="--load"), resume=settings.resume)
    if is_hf_dir(path):
        return StartPoint(kind="hf", path=path)
    raise CheckpointError(f"--load {path}: neither {TRACKER} nor config.json is in it")


def reference_point(config: Config) -> StartPoint:
    """Choose where reference weights come from: ``--ref-load``, else ``--hf-checkpoint``.

    Raises:
        CheckpointError: Neither can be loaded.
    """
    settings = config.checkpoint
    if settings.ref_load is not None:
        return _weights_point(Path(settings.ref_load), settings.ref_ckpt_step, flag="--ref-load")
    if config.hf is None:
        raise CheckpointError("nothing to start from: give --load, --ref-load or --hf-checkpoint")
    return StartPoint(kind="hf", path=Path(config.hf.path))


def teacher_point(config: Config) -> StartPoint:
    """Where the weights of a Megatron teacher come from: ``--opd-teacher-load``.

    Raises:
        CheckpointError: It cannot be loaded.
    """
    algorithm = config.algorithm
    if algorithm.opd_teacher_load is None:
        raise CheckpointError("--opd-type megatron needs --opd-teacher-load, the directory of the teacher's weights")
    return _weights_point(Path(algorithm.opd_teacher_load), algorithm.opd_teacher_ckpt_step, flag="--opd-teacher-load")


def _weights_point(path: Path, step: int | None, *, flag: str) -> StartPoint:
    if is_megatron_dir(path):
        return _megatron_point(path, step, flag=flag)
    if is_hf_dir(path):
        return StartPoint(kind="hf", path=path)
    raise CheckpointError(f"{flag} {path}: neither {TRACKER} nor config.json is in it")


def _megatron_point(root: Path, step: int | None, *, flag: str) -> StartPoint:
    recover(root)
    text = str(step) if step is not None else (root / TRACKER).read_text().strip()
    if text == RELEASE:
        path, iteration = root / RELEASE, None
    elif text.isdigit():
        path, iteration = iteration_dir(root, int(text)), int(text)
    else:
        raise CheckpointError(f"{flag} {root}: {TRACKER} says {text!r}; expected a number or {RELEASE!r}")
    if not (path / "metadata.json").is_file():
        there = ", ".join(map(str, saved_iterations(root))) or "none"
        raise CheckpointError(f"{flag} {root}: checkpoint {path.name} is missing or incomplete; complete ones: {there}")
    return StartPoint(kind="megatron", path=path, iteration=iteration)


def begin_save(root: Path, iteration: int) -> Path:
    """Clean up after killed saves and make the empty directory that a save writes into. One process only."""
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    for entry in root.iterdir():
        if _LEFTOVER.fullmatch(entry.name):
            logger.info("removing %s, left by a save that did not finish", entry)
            shutil.rmtree(entry)
    target = root / f".{iteration_dir(root, iteration).name}.saving"
    target.mkdir()
    return target


def finish_save(root: Path, iteration: int, *, keep: int | None = None) -> None:
    """Give a written checkpoint its name, point the tracker to it and drop old ones. One process only.

    Args:
        root: ``--save``.
        iteration: Rollout id.
        keep: How many checkpoints stay; None keeps all.
    """
    final = iteration_dir(root, iteration)
    saving, replaced = root / f".{final.name}.saving", root / f".{final.name}.replaced"
    force_tree_to_disk(saving)
    if final.exists():
        final.rename(replaced)
    saving.rename(final)
    _sync(root)
    _write_tracker(root, str(iteration))
    if replaced.exists():
        shutil.rmtree(replaced)
    if keep is not None:
        for old in [i for i in saved_iterations(root) if i != iteration][: -(keep - 1) or None]:
            _delete(root, old)


def recover(root: Path) -> None:
    """Bring back a checkpoint whose replacement was interrupted between two renames."""
    if not root.is_dir():
        return
    for entry in root.iterdir():
        match = _LEFTOVER.fullmatch(entry.name)
        if match and match[2] == "replaced" and not (root / match[1]).exists():
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                entry.rename(root / match[1])


def _delete(root: Path, iteration: int) -> None:
    """Remove a checkpoint; renamed first, so that a half-removed one is never taken for a good one."""
    path = iteration_dir(root, iteration)
    doomed = root / f".{path.name}.deleting"
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write_tracker(root: Path, text: str) -> None:
    temporary = root / f".{TRACKER}.new"
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / TRACKER)
    _sync(root)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
