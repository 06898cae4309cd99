"""Only what changed since the last version, on a shared disk.

Owns the trainer's copy of the bytes that the engines have, from which the next delta is made. The sequence of versions
starts from a base that every host can read: ``--hf-checkpoint`` where its tensors have the layout of the trainer's,
else a checkpoint that is written once. Version 1 follows at once, so that engines have the trainer's exact weights
before the first rollout. Tests hold: base and deltas together give the trainer's bytes, also after a restart.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slime.errors import CheckpointError, WeightSyncError
from slime.weights.delta_encoding import ChecksumFormat, Encoding, check_size
from slime.weights.delta_files import DeltaWriter, remove_versions, version_dir
from slime.weights.from_files import Published
from slime.weights.hf_files import HfWriter
from slime.weights.pull_request import PullRequest
from slime.weights.report import Bucket
from slime.weights.tensor_bytes import bytes_of, layout_of, tensor_places

BASE_DIR = "base"
"""Below the shared directory: the checkpoint that deltas start from, if it is not ``--hf-checkpoint``."""

_BASE_SHARD_BYTES = 2**30
_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaForm:
    """How deltas are written.

    Args:
        encoding: Form of a change.
        checksum_format: Of whole new tensors.
    """

    encoding: Encoding
    checksum_format: ChecksumFormat


class DeltaPublisher:
    """Writes deltas; see ``Publisher``. Holds a copy of all weights in this process's memory.

    Args:
        disk_dir: The shared directory; versions of earlier runs in it are removed.
        hf_checkpoint: What engines are started with.
        form: How deltas are written.
        pre_read_hook: See ``PullRequest``.
    """

    def __init__(self, disk_dir: Path, hf_checkpoint: Path, form: DeltaForm, *, pre_read_hook: str | None) -> None:
        self._disk_dir = disk_dir.absolute()
        self._hf_checkpoint = hf_checkpoint.absolute()
        self._form = form
        self._pre_read_hook = pre_read_hook
        self._chain = uuid.uuid4().hex
        self._base: Path | None = None
        self._base_version = 0
        self._version = 0
        self._held: dict[str, Tensor] = {}

    def publish(self, buckets: Iterable[Bucket], version: int) -> Published:
        """Write what changed since the last version; nothing if that was this one already."""
        try:
            if self._base is None:
                return self._start(buckets, version)
            if version == self._version:
                self._check_unchanged(buckets)
                return self._published(None)
            return self._continue(buckets, version)
        except BaseException as error:
            self._forget()
            if isinstance(error, OSError | CheckpointError):
                raise WeightSyncError(f"weight version {version} cannot be written: {error}") from error
            raise

    def loaded(self, published: Published) -> None:
        """Nothing to remove: a restarted engine needs every delta."""

    def _forget(self) -> None:
        """After a failure the copy is not that of any version: the next one begins a new sequence."""
        self._base = None
        self._held = {}
        self._chain = uuid.uuid4().hex

    def _start(self, buckets: Iterable[Bucket], version: int) -> Published:
        """Begin the sequence: choose its base and bring it to the trainer's weights."""
        remove_versions(self._disk_dir)
        for bucket in buckets:
            for name, tensor in bucket:
                check_size(tensor.nbytes, self._form.encoding, name)
                self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        places = tensor_places(self._hf_checkpoint)
        can_patch = all(name in places and places[name].layout == layout_of(t) for name, t in self._held.items())
        if _OUTPUT in places and _OUTPUT not in self._held:  # a stale copy of tied embeddings would be loaded
            can_patch = False
        base = self._hf_checkpoint if can_patch else self._write_base()
        delta = self._writer(version)
        for name, tensor in self._held.items():
            delta.add(name, places[name].map() if can_patch else bytes_of(tensor), bytes_of(tensor))
        delta.finish()
        self._base, self._base_version, self._version = base, version - 1, version
        return self._published(delta, base_bytes=0 if can_patch else delta.total_bytes)

    def _continue(self, buckets: Iterable[Bucket], version: int) -> Published:
        if version != self._version + 1:
            raise WeightSyncError(f"weight version {version} cannot follow {self._version} as a delta")
        delta = self._writer(version)
        for bucket in buckets:
            for name, tensor in bucket:
                held = self._held.get(name)
                if held is None or layout_of(held) != layout_of(tensor):
                    raise WeightSyncError(f"tensor {name} is not as it was in version {self._version}")
                delta.add(name, bytes_of(held), bytes_of(tensor))
                held.copy_(tensor.detach())
        delta.finish()
        self._version = version
        return self._published(delta)

    def _write_base(self) -> Path:
        """Write the held weights as a complete checkpoint, because those of ``--hf-checkpoint`` cannot be patched."""
        base = self._disk_dir / BASE_DIR
        writer = HfWriter(base, self._hf_checkpoint)
        shard: list[tuple[str, Tensor]] = []
        filled = 0
        for name, tensor in self._held.items():
            if shard and filled + tensor.nbytes > _BASE_SHARD_BYTES:
                writer.write(shard)
                shard, filled = [], 0
            shard.append((name, tensor))
            filled += tensor.nbytes
        writer.write(shard)
        writer.finish()
        return base

    def _writer(self, version: int) -> DeltaWriter:
        return DeltaWriter(
            self._disk_dir,
            version,
            chain=self._chain,
            encoding=self._form.encoding,
            checksum_format=self._form.checksum_format,
        )

    def _check_unchanged(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            for name, tensor in bucket:
                if not np.array_equal(bytes_of(self._held[name]), bytes_of(tensor)):
                    raise WeightSyncError(f"tensor {name} changed although the weight version is still {self._version}")

    def _published(self, delta: DeltaWriter | None, base_bytes: int = 0) -> Published:
        """Describe the newest version; ``delta`` is what was just written."""
        assert self._base is not None, "the sequence has begun"
        metrics: dict[str, float] = {}
        if delta is not None:
            metrics["perf/update_weights_density"] = delta.changed_bytes / max(delta.total_bytes, 1)
        return Published(
            directory=version_dir(self._disk_dir, self._version),
            is_new=delta is not None,
            pull=PullRequest(
                local_dir="",
                base_dir=str(self._base),
                base_version=self._base_version,
                disk_dir=str(self._disk_dir),
                version=self._version,
                chain=self._chain,
                timeout_seconds=0.0,
                pre_read_hook=self._pre_read_hook,
            ),
            wire_bytes=base_bytes + (delta.wire_bytes if delta is not None else 0),
            tensors=len(self._held),
            metrics=metrics,
        )
