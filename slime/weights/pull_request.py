"""What the trainer asks of an engine's host: to bring the checkpoint on its own disk up to a published version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What a host's directory shall become.

    Args:
        local_dir: The directory on the host.
        base_dir: Complete checkpoint that the sequence of versions starts from; every host can read it.
        base_version: Its version.
        disk_dir: Shared directory with the deltas after it.
        version: The wanted version; with ``base_version`` only the base is copied.
        chain: Names the sequence; a directory of another one starts from the base.
        timeout_seconds: For other pulls of the same host to end.
        visible_seconds: For a published file to be seen there.
        pre_read_hook: Path of a function that is called with each directory before it is read.
    """

    local_dir: str
    base_dir: str
    base_version: int
    disk_dir: str
    version: int
    chain: str
    timeout_seconds: float
    visible_seconds: float = 60.0  # longer than the attribute caches of network file systems
    pre_read_hook: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """What one pull did.

    Args:
        host: Where.
        copied_bytes: Of the base; 0 if the directory was of this sequence already.
        patched_tensors: Over all versions that were applied.
        seconds: With the wait for the lock.
    """

    host: str
    copied_bytes: int
    patched_tensors: int
    seconds: float


class HostPull(Protocol):
    """Pulls on every host of one engine; pickles, so that the trainer can call it."""

    def __call__(self, request: PullRequest, /) -> list[PullReport]:
        """Pull on all hosts at the same time; raises what the first that fails raised."""
        ...
