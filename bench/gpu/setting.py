"""What the measurements share: a random model of a known shape, a time budget, and results as markdown."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import make_tiny_model

QWEN3_600M: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "matrix_std": 0.02,
}
TINY: Mapping[str, Any] = {"num_hidden_layers": 2, "tie_word_embeddings": True, "matrix_std": 0.1}
SHAPES = {"qwen3-0.6b": QWEN3_600M, "tiny": TINY}
PACKAGES = ("torch", "megatron-core", "transformers", "sglang", "ray")


def make_model(folder: Path, shape: str) -> Path:
    """A model directory with random weights; made once per folder, also when two measurements begin together."""
    path, unfinished = folder / shape, folder / f"{shape}.{os.getpid()}"
    if not path.exists():
        make_tiny_model(unfinished, "qwen3", **SHAPES[shape])
        with contextlib.suppress(OSError):  # the other one was first
            unfinished.rename(path)
    return path


class Budget:
    """Seconds that a measurement may take in all."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def allows(self, seconds: float) -> bool:
        """Whether something that takes this long may begin."""
        return time.monotonic() + seconds < self._end


def await_file(path: Path | None, seconds: float) -> None:
    """Wait until another measurement has written this file; go on without it when the time is over."""
    end = time.monotonic() + seconds
    while path is not None and not path.exists():
        if time.monotonic() > end:
            say(f"{path} did not appear within {seconds:.0f} s; going on")
            return
        time.sleep(0.2)


def announce(path: Path | None) -> None:
    """Write the file that another measurement waits for."""
    if path is not None:
        path.touch()


def say(text: str) -> None:
    """A line at once: the process may be ended before it has all its numbers."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def versions() -> str:
    """Packages and hardware in one line."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return ", ".join([device, f"Python {platform.python_version()}", *found])


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Markdown of rows with the same columns."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(folder: Path, name: str, title: str, *parts: str) -> None:
    """Write ``{name}.md`` with the command, the date and the versions above the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = f"    python -m bench.gpu.{name} {shlex.join(sys.argv[1:])}".rstrip()
    (folder / f"{name}.md").write_text("\n\n".join([f"# {title}", command, f"{day}: {versions()}", *parts]) + "\n")
