"""The table of engine tensors against what SGLang's own model classes hold; DeepSeek's do not load on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.weights.digests import CpuDigest
from slime.weights.engine_names import EngineLayout, EngineTable, known_layout
from slime.weights.expected import FusedExpectation
from tests.sglang.servers import shim_environment
from tests.support.tiny_models import Family, make_tiny_model, tiny_weights

# On two processes SGLang pads widths that are not multiples of 64.
MODELS: dict[str, tuple[Family, int, dict[str, Any]]] = {
    "llama": ("llama", 1, {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", 2, {}),
    "qwen3": ("qwen3", 1, {}),
    "glm4_moe": ("glm4_moe", 2, {"moe_intermediate_size": 64}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(root / name, family, **over) for name, (family, _, over) in MODELS.items()}


@pytest.fixture(scope="module")
def held(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    out = tmp_path_factory.mktemp("held") / "checksums.json"
    arguments = [text for name, folder in folders.items() for text in (str(folder), str(MODELS[name][1]))]
    environment = {
        **os.environ,
        **shim_environment(),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "tests.sglang.loaded_checksums", str(out), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    sys.stderr.write(done.stderr[-8000:])  # shown if a test fails
    return dict(zip(folders, json.loads(out.read_text()), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_that_the_engine_holds_is_expected(
    name: str, folders: dict[str, Path], held: dict[str, list[dict[str, str]]]
) -> None:
    config = json.loads((folders[name] / "config.json").read_text())
    layout = known_layout({"tp_size": MODELS[name][1], "device": "cpu"}, config)
    assert isinstance(layout, EngineLayout), layout
    expectation = FusedExpectation(EngineTable(layout), CpuDigest, None, lambda _: True)
    for key, tensor in tiny_weights(config).items():
        expectation.add(key, tensor)
    expected = expectation.finish()
    assert not expected.unknown
    assert expected.ranks == held[name]
