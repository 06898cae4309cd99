"""A published delta on disk: ``weight_v000002/`` with compressed changes per tensor, and an index.

Owns names, the index and the writing aside. A version directory is complete or not there. The metadata of each
safetensors file holds the checksums of the whole new tensors. Tests hold: a writer that is killed between two files
leaves nothing that a reader takes for a version.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.numpy

from slime.errors import WeightSyncError
from slime.files import force_tree_to_disk
from slime.weights.delta_encoding import COMPRESSION, Bytes, ChecksumFormat, Encoding, checksum, encode
from slime.weights.hf_files import INDEX
from slime.weights.tensor_bytes import read_header

_save_file = cast(Any, safetensors.numpy).save_file
_SHARD_BYTES = 2**30
_ASIDE = ".{}.incomplete"
_VERSION = re.compile(r"weight_v\d{6,}")
_LEFTOVER = re.compile(r"\.weight_v\d{6,}\.(incomplete|retired)")
_ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite")
_CHECKSUMS: tuple[ChecksumFormat, ...] = ("xxh3-128", "blake3", "adler32")


def version_dir(disk_dir: Path, version: int) -> Path:
    """Where a version is published, whole or as a delta."""
    return disk_dir / f"weight_v{version:06d}"


def remove_unfinished(disk_dir: Path) -> None:
    """Remove what writers left that were killed; versions and other files stay."""
    for path in disk_dir.glob(".weight_v*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)


def remove_versions(disk_dir: Path) -> None:
    """Remove what an earlier run published or left unfinished; other files stay."""
    remove_unfinished(disk_dir)
    for path in disk_dir.glob("weight_v*"):
        if _VERSION.fullmatch(path.name):
            shutil.rmtree(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaIndex:
    """What a version directory says about itself.

    Args:
        version: It leads to this version.
        base_version: From this one.
        chain: Names the sequence of versions that it belongs to, so that two runs cannot be mixed up.
        encoding: Form of every change.
        checksum_format: Of the whole new tensors.
        weight_map: Tensor name to file name, for tensors that changed.
    """

    version: int
    base_version: int
    chain: str
    encoding: Encoding
    checksum_format: ChecksumFormat
    weight_map: Mapping[str, str]

    def to_json(self) -> str:
        """Content of the index file."""
        metadata = {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base_version:06d}",
            "delta_encoding": self.encoding,
            "compression_format": COMPRESSION,
            "checksum_format": self.checksum_format,
            "chain": self.chain,
        }
        return json.dumps({"metadata": metadata, "weight_map": dict(sorted(self.weight_map.items()))}, indent=2) + "\n"

    @classmethod
    def read(cls, directory: Path) -> DeltaIndex:
        """Read the index of a version directory.

        Raises:
            WeightSyncError: There is none, or it is not one of a delta that this version understands.
        """
        path = directory / INDEX
        try:
            content = cast("dict[str, Any]", json.loads(path.read_text()))
            metadata = cast("dict[str, str]", content["metadata"])
            if metadata["compression_format"] != COMPRESSION:
                raise ValueError(f"compression_format {metadata['compression_format']!r}; accepted: {COMPRESSION}")
            if metadata["delta_encoding"] not in _ENCODINGS:
                raise ValueError(f"delta_encoding {metadata['delta_encoding']!r}; accepted: {', '.join(_ENCODINGS)}")
            if metadata["checksum_format"] not in _CHECKSUMS:
                raise ValueError(f"checksum_format {metadata['checksum_format']!r}; accepted: {', '.join(_CHECKSUMS)}")
            return cls(
                version=int(metadata["version"]),
                base_version=int(metadata["base_version"]),
                chain=metadata["chain"],
                encoding=metadata["delta_encoding"],
                checksum_format=metadata["checksum_format"],
                weight_map=cast("dict[str, str]", content["weight_map"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightSyncError(f"{path}: is no index of a weight delta: {error!r}") from error


class DeltaWriter:
    """Writes one version.

    Args:
        disk_dir: The shared directory.
        version: It leads to this version from the one before.
        chain: See ``DeltaIndex``.
        encoding: Form of every change.
        checksum_format: Of the whole new tensors.
        shard_bytes: A file is closed when it has more.

    Raises:
        WeightSyncError: The directory cannot be written.
    """

    def __init__(
        self,
        disk_dir: Path,
        version: int,
        *,
        chain: str,
        encoding: Encoding,
        checksum_format: ChecksumFormat,
        shard_bytes: int = _SHARD_BYTES,
    ) -> None:
        self._out = version_dir(disk_dir, version)
        self._aside = disk_dir / _ASIDE.format(self._out.name)
        self._version, self._chain = version, chain
        self._encoding: Encoding = encoding
        self._checksum_format: ChecksumFormat = checksum_format
        self._shard_bytes = shard_bytes
        self._shard: dict[str, Bytes] = {}
        self._checksums: dict[str, str] = {}
        self._shards: list[list[str]] = []
        self.changed_bytes = 0
        self.total_bytes = 0
        self.wire_bytes = 0
        try:
            if self._aside.exists():
                shutil.rmtree(self._aside)
            self._aside.mkdir(parents=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, name: str, old: Bytes, new: Bytes) -> None:
        """Take one tensor's ``[N]`` bytes before and after; equal ones are counted and left out."""
        self.total_bytes += new.size
        change = encode(old, new, self._encoding)
        if change is None:
            return
        self.changed_bytes += change.changed_bytes
        self._shard[name] = change.payload
        self._checksums[name] = checksum(new, self._checksum_format)
        if sum(payload.size for payload in self._shard.values()) > self._shard_bytes:
            self._write_shard()

    def finish(self) -> Path:
        """Complete the version and give it its name; returns its directory."""
        self._write_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        try:
            for i, names in enumerate(self._shards):
                file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
                (self._aside / f"{i}.safetensors").replace(self._aside / file)
                weight_map |= dict.fromkeys(names, file)
            index = DeltaIndex(
                version=self._version,
                base_version=self._version - 1,
                chain=self._chain,
                encoding=self._encoding,
                checksum_format=self._checksum_format,
                weight_map=weight_map,
            )
            (self._aside / INDEX).write_text(index.to_json())
            force_tree_to_disk(self._aside)
            self._aside.replace(self._out)
            force_tree_to_disk(self._out)
        except OSError as error:
            raise self._unwritable(error) from error
        return self._out

    def _write_shard(self) -> None:
        if not self._shard:
            return
        try:
            _save_file(self._shard, self._aside / f"{len(self._shards)}.safetensors", metadata=self._checksums)
        except (OSError, safetensors.SafetensorError) as error:  # a full disk is the latter
            raise self._unwritable(error) from error
        self._shards.append(list(self._shard))
        self.wire_bytes += sum(payload.size for payload in self._shard.values())
        self._shard, self._checksums = {}, {}

    def _unwritable(self, error: Exception) -> WeightSyncError:
        return WeightSyncError(f"weight version {self._version} cannot be written to {self._out}: {error}")


class DeltaReader:
    """Reads the changes of one version directory.

    Args:
        directory: Of the version.

    Raises:
        WeightSyncError: Its index cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self.index = DeltaIndex.read(directory)
        self._directory = directory

    def changes(self, file: str) -> Mapping[str, tuple[Bytes, str]]:
        """Payload and checksum of every tensor in one file.

        Raises:
            WeightSyncError: The file is missing or damaged.
        """
        path = self._directory / file
        try:
            places, checksums = read_header(path)
            return {name: (place.map(), checksums[name]) for name, place in places.items()}
        except (OSError, ValueError, KeyError) as error:
            raise WeightSyncError(f"{path}: is missing or damaged: {error!r}") from error

    @property
    def files(self) -> list[str]:
        """Names of the files, in order."""
        return sorted(set(self.index.weight_map.values()))
