"""What the measurements share: a random model of a known shape, a time budget, and results as markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
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
}
TINY: Mapping[str, Any] = {"num_hidden_layers": 2, "tie_word_embeddings": True}
SHAPES = {"qwen3-0.6b": QWEN3_600M, "tiny": TINY}
PACKAGES = ("torch", "megatron-core", "transformers", "sglang", "ray")


def make_model(folder: Path, shape: str) -> Path:
    """A model directory with random weights; made once per folder."""
    path = folder / shape
    if not (path / "config.json").exists():
        make_tiny_model(path, "qwen3", **SHAPES[shape])
    return path


class Budget:
    """Seconds that a measurement may take in all."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def allows(self, seconds: float) -> bool:
        """Whether something that takes this long may begin."""
        return time.monotonic() + seconds < self._end


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
