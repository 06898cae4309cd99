"""The lower layers and the rollout import without Megatron, SGLang and Ray, as on a machine that lacks them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LEAN = [
    "slime.types",
    "slime.errors",
    "slime.config",
    "slime.algorithms",
    "slime.observability",
    "slime.data",
    "slime.rewards",
    "slime.weights",
    "slime.plugins",
    "slime.engines.api",
    "slime.rollout",
]

IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"megatron", "sglang", "sglang_router", "ray", "triton"}:
            raise ModuleNotFoundError(f"No module named {name!r} (absent in the lean lane)", name=name)
        return None

sys.meta_path.insert(0, Absent())
names = []
for top in sys.argv[1:]:
    module = importlib.import_module(top)
    names.append(top)
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), top + "."):
        importlib.import_module(info.name)
        names.append(info.name)
print(len(names))
"""


@pytest.mark.timeout(120)
def test_lower_layers_import_without_heavy_packages() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, *LEAN]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > len(LEAN)


def test_the_blocker_blocks() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, "ray"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode != 0
    assert "absent in the lean lane" in result.stderr
