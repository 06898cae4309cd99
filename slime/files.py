"""Files that are there as a whole or not at all.

Owns the one way in which slime replaces a file that a later run relies on. Tests hold: a writer that
fails or is killed leaves the old file as it was, and what it left beside it is removed by a later write.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_ASIDE_SUFFIX = ".slime-tmp"
_STALE_SECONDS = 3600.0


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file aside, force it to the disk, then put it in the place of ``path``.

    Missing parent folders are made. What killed writers left in the folder more than an hour ago is
    removed.

    Args:
        path: The file to make or replace.
        write: Writes the content to the path that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    aside = path.parent / f".{path.name}.{os.getpid()}{_ASIDE_SUFFIX}"
    try:
        write(aside)
        _force_to_disk(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _force_to_disk(path.parent)  # the renaming itself


def force_tree_to_disk(folder: Path) -> None:
    """Force a folder's files to the disk: a later renaming must not survive a power cut that its content did not."""
    for entry in folder.rglob("*"):
        _force_to_disk(entry)
    _force_to_disk(folder)


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove old asides. By age, because the writer of a young one may be alive on another host."""
    for leftover in folder.glob(f".*{_ASIDE_SUFFIX}"):
        try:
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()
        except FileNotFoundError:  # another process was faster
            continue
