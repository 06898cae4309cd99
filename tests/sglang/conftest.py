"""Tests that need the real SGLang: ``make test-sglang`` runs them, other environments leave them out."""

import sys
from importlib.util import find_spec
from pathlib import Path

SHIM = Path(__file__).parent / "shim"

collect_ignore_glob = []
if find_spec("sglang") is None:
    collect_ignore_glob.append("test_*.py")
elif str(SHIM) not in [str(Path(entry).resolve()) for entry in sys.path]:
    raise RuntimeError("without PYTHONPATH=tests/sglang/shim SGLang cannot be imported here; use make test-sglang")
