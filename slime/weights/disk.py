"""A whole checkpoint per version on a shared disk."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from slime.errors import CheckpointError, WeightSyncError
from slime.weights.delta_files import remove_unfinished, version_dir
from slime.weights.from_files import Published
from slime.weights.hf_files import HfWriter
from slime.weights.pull_request import PullRequest
from slime.weights.report import Bucket


class CheckpointPublisher:
    """Writes every version as a Hugging Face model directory; see ``Publisher``.

    Args:
        disk_dir: The shared directory.
        template: Model directory whose configuration and tokenizer files are copied.
        keep_files: Whether versions stay when the engines have loaded them.
        is_pulled: Whether hosts copy a version to a disk of their own.
        pre_read_hook: See ``PullRequest``.
    """

    def __init__(
        self, disk_dir: Path, template: Path, *, keep_files: bool, is_pulled: bool, pre_read_hook: str | None
    ) -> None:
        self._disk_dir = disk_dir.absolute()
        self._template = template.absolute()
        self._keep_files = keep_files
        self._is_pulled = is_pulled
        self._pre_read_hook = pre_read_hook

    def publish(self, buckets: Iterable[Bucket], version: int) -> Published:
        """Write the checkpoint; each bucket is a file."""
        directory = version_dir(self._disk_dir, version)
        size = tensors = 0
        try:
            remove_unfinished(self._disk_dir)  # of a run that was killed
            writer = HfWriter(directory, self._template)
            for bucket in buckets:
                writer.write(bucket)
                size += sum(tensor.nbytes for _, tensor in bucket)
                tensors += len(bucket)
            writer.finish()
        except (OSError, CheckpointError) as error:
            raise WeightSyncError(f"weight version {version} cannot be written: {error}") from error
        pull = self._pull(directory, version) if self._is_pulled else None
        return Published(directory=directory, is_new=True, pull=pull, wire_bytes=size, tensors=tensors)

    def loaded(self, published: Published) -> None:
        """Remove the version unless it was asked to stay."""
        if not self._keep_files:
            shutil.rmtree(published.directory, ignore_errors=True)

    def _pull(self, directory: Path, version: int) -> PullRequest:
        return PullRequest(
            local_dir="",
            base_dir=str(directory),
            base_version=version,
            disk_dir=str(self._disk_dir),
            version=version,
            chain=uuid.uuid4().hex,  # a version that is written again is copied again
            timeout_seconds=0.0,
            pre_read_hook=self._pre_read_hook,
        )
