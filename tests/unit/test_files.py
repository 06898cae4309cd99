"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.files import write_atomically


def test_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    for text in ("one", "two"):
        write_atomically(path, lambda aside, text=text: aside.write_text(text))
        assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_a_failing_writer_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_text("old")

    def write(aside: Path) -> None:
        aside.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]


def test_what_a_killed_writer_left_is_removed_later(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    code = (
        "import os, sys; from pathlib import Path; from slime.files import write_atomically\n"
        "write_atomically(Path(sys.argv[1]), lambda aside: (aside.write_text('half'), os.kill(os.getpid(), 9)))"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=30)
    (leftover,) = tmp_path.iterdir()
    write_atomically(path, lambda aside: aside.write_text("new"))
    assert leftover.exists(), "its writer might be alive on another host"
    os.utime(leftover, (0, 0))
    write_atomically(path, lambda aside: aside.write_text("new"))
    assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]
