"""Bytes found through headers are those that safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from slime.errors import CheckpointError
from slime.weights.tensor_bytes import Layout, bytes_of, layout_of, tensor_places
from tests.support.tiny_models import make_tiny_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_places_hold_the_tensors(tmp_path: Path, dtype: str) -> None:
    model = make_tiny_model(tmp_path / "m", tokenizer=False, torch_dtype=dtype)
    places = tensor_places(model)
    with safe_open(model / "model.safetensors", framework="pt") as reader:
        assert set(places) == set(reader.keys())
        for name, place in places.items():
            tensor = reader.get_tensor(name)
            assert place.layout == layout_of(tensor)
            assert place.map().tobytes() == bytes_of(tensor).tobytes()


def test_bytes_are_row_major_whatever_the_strides() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3).t()
    assert bytes_of(tensor).tobytes() == tensor.contiguous().numpy().tobytes()
    assert bytes_of(torch.tensor(1.0)).tobytes() == b"\x00\x00\x80?"
    assert bytes_of(torch.zeros(0, 3)).size == 0
    assert layout_of(torch.zeros(0, 3, dtype=torch.bfloat16)) == Layout("BF16", (0, 3))


def test_written_bytes_are_read_back(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", tokenizer=False)
    name, place = next(iter(tensor_places(model).items()))
    place.map("r+")[:] = 0
    with safe_open(model / "model.safetensors", framework="pt") as reader:
        assert reader.get_tensor(name).count_nonzero() == 0


def test_truncated_files_are_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", tokenizer=False)
    file = model / "model.safetensors"
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:3], b"\x00" * 8):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: is no complete safetensors file"):
            tensor_places(model)
