"""A version directory is complete or not there, and says what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from slime.errors import WeightSyncError
from slime.weights.delta_encoding import checksum
from slime.weights.delta_files import DeltaIndex, DeltaReader, DeltaWriter, remove_versions, version_dir


def writer(disk: Path, version: int = 1, **options: Any) -> DeltaWriter:
    return DeltaWriter(disk, version, chain="run", encoding="xor", checksum_format="adler32", **options)


def data(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.uint8)


def test_layout_of_a_version(tmp_path: Path) -> None:
    delta = writer(tmp_path, 3, shard_bytes=1)
    delta.add("a", data(1, 2), data(1, 3))
    delta.add("same", data(7), data(7))
    delta.add("b", data(0), data(255))
    out = delta.finish()
    assert out == tmp_path / "weight_v000003" == version_dir(tmp_path, 3)
    assert (delta.changed_bytes, delta.total_bytes) == (2, 4)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == [*names, "model.safetensors.index.json", out.name]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": names[0], "b": names[1]}
    assert index["metadata"] == {
        "version": "000003",
        "base_version": "000002",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
        "chain": "run",
    }
    with safe_open(out / names[0], framework="np") as shard:
        assert shard.metadata() == {"a": checksum(data(1, 3), "adler32")}
    payload = load_file(out / names[0])["a"]
    assert payload.dtype == np.uint8
    assert delta.wire_bytes == payload.size + load_file(out / names[1])["b"].size


def test_reader_finds_what_was_written(tmp_path: Path) -> None:
    delta = writer(tmp_path)
    delta.add("a", data(1), data(2))
    reader = DeltaReader(delta.finish())
    assert (reader.index.version, reader.index.base_version, reader.index.chain) == (1, 0, "run")
    (file,) = reader.files
    payload, found = reader.changes(file)["a"]
    assert found == "00030003"
    assert payload.tobytes() == load_file(tmp_path / "weight_v000001" / file)["a"].tobytes()


def test_nothing_changed_is_a_version_too(tmp_path: Path) -> None:
    delta = writer(tmp_path)
    delta.add("a", data(1), data(1))
    reader = DeltaReader(delta.finish())
    assert reader.files == []
    assert (delta.changed_bytes, delta.total_bytes, delta.wire_bytes) == (0, 1, 0)


def test_an_unfinished_version_is_not_there_and_is_replaced(tmp_path: Path) -> None:
    killed = writer(tmp_path, shard_bytes=0)
    killed.add("a", data(1), data(2))
    assert not version_dir(tmp_path, 1).exists()
    again = writer(tmp_path)
    again.add("b", data(1), data(3))
    assert DeltaReader(again.finish()).index.weight_map == {"b": "model-00001-of-00001.safetensors"}


def test_old_versions_are_removed_and_nothing_else(tmp_path: Path) -> None:
    writer(tmp_path, 1).finish()
    writer(tmp_path, 2)
    for name in ("weight_v000001_of_a_user", "notes.txt"):
        (tmp_path / name).write_text("mine")
    remove_versions(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "weight_v000001_of_a_user"]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(WeightSyncError, match=r"version 1 cannot be written to .*file/weight_v000001"):
        writer(blocked)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("compression_format", "lz4", "compression_format 'lz4'; accepted: zstd"),
        ("delta_encoding", "add", "delta_encoding 'add'; accepted: xor, overwrite"),
        ("checksum_format", "md5", "checksum_format 'md5'; accepted: xxh3-128, blake3, adler32"),
        ("version", "x", "no index of a weight delta"),
    ],
)
def test_foreign_indices_are_refused(tmp_path: Path, key: str, value: str, message: str) -> None:
    out = writer(tmp_path).finish()
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"][key] = value
    path.write_text(json.dumps(index))
    with pytest.raises(WeightSyncError, match=message):
        DeltaIndex.read(out)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    delta = writer(tmp_path)
    delta.add("a", data(*range(200)), data(*range(1, 201)))
    out = delta.finish()
    (file,) = DeltaReader(out).files
    whole = (out / file).read_bytes()
    for damaged in (whole[:-1], whole[:4], b"\xff" * 16):
        (out / file).write_bytes(damaged)
        with pytest.raises(WeightSyncError, match=f"{file}: is missing or damaged"):
            DeltaReader(out).changes(file)
    (out / file).unlink()
    with pytest.raises(WeightSyncError, match=f"{file}: is missing or damaged"):
        DeltaReader(out).changes(file)
