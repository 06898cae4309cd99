"""Bring the checkpoint on an engine's host up to a published version. Runs in a process on that host.

Owns the local directory: a complete Hugging Face model that deltas patch in place, and ``.weight_sync/`` with the lock
of the host and the version that the directory has. The state is removed before a file is touched and written back
after the last one, so that whatever interrupts a pull, the next one starts from the base. Tests hold:
a killed pull, a gap, a damaged delta and a local file that somebody changed never pass for a version.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import shutil
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

from slime.errors import CheckpointError, PluginError, WaitTimeoutError, WeightSyncError
from slime.files import write_atomically
from slime.plugins import load_plugin
from slime.weights.delta_encoding import apply, checksum
from slime.weights.delta_files import DeltaReader, version_dir
from slime.weights.hf_files import INDEX
from slime.weights.pull_request import PullReport, PullRequest
from slime.weights.tensor_bytes import TensorPlace, tensor_places

logger = logging.getLogger(__name__)

PRE_READ_FLAG = "--sglang-custom-pull-weights-pre-read-hook"

_SYNC_DIR = ".weight_sync"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOCK_POLL_SECONDS = 0.05
_VISIBLE_POLL_SECONDS = 0.1


def pull(request: PullRequest) -> PullReport:
    """Bring this host's directory to the wanted version.

    Raises:
        WeightSyncError: A directory cannot be seen or read, a version is missing, a checksum differs, the disk is
            full. The next pull starts from the base.
        WaitTimeoutError: Another pull of this host did not end in time.
    """
    started = time.monotonic()
    host = socket.gethostname()
    local = Path(request.local_dir)
    try:
        with _locked(local, request.timeout_seconds):
            copied, patched = _pull(local, request)
    except (WeightSyncError, WaitTimeoutError, PluginError) as error:
        raise type(error)(f"host {host}: {error}") from error
    except (OSError, CheckpointError) as error:
        raise WeightSyncError(f"host {host}: {_explained(error, local)}") from error
    return PullReport(host=host, copied_bytes=copied, patched_tensors=patched, seconds=time.monotonic() - started)


def _pull(local: Path, request: PullRequest) -> tuple[int, int]:
    state = _State(local)
    version = state.read(request.chain)
    before_read = _pre_read_hook(request.pre_read_hook)
    copied = patched = 0
    if version is None or not request.base_version <= version <= request.version:
        base = Path(request.base_dir)
        _wait_visible(base / "config.json", request.visible_seconds)
        before_read(str(base))
        state.forget()
        copied = _copy_checkpoint(base, local)
        version = request.base_version
        state.write(request.chain, version)
    if version < request.version:
        places = tensor_places(local)
        while version < request.version:
            directory = version_dir(Path(request.disk_dir), version + 1)
            _wait_visible(directory / INDEX, request.visible_seconds)
            before_read(str(directory))
            state.forget()
            patched += _apply_version(directory, places, expected=version + 1, chain=request.chain)
            version += 1
            state.write(request.chain, version)
    return copied, patched


def _apply_version(directory: Path, places: dict[str, TensorPlace], *, expected: int, chain: str) -> int:
    """Patch the local files with one version; returns the number of tensors."""
    delta = DeltaReader(directory)
    index = delta.index
    if (index.version, index.base_version, index.chain) != (expected, expected - 1, chain):
        raise WeightSyncError(
            f"{directory} leads from version {index.base_version} to {index.version} of the versions {index.chain}; "
            f"version {expected} of {chain} is needed: does another run publish into the same --update-weight-disk-dir?"
        )
    patched = 0
    for file in delta.files:
        for name, (payload, wanted) in delta.changes(file).items():
            if name not in places:
                raise WeightSyncError(f"{directory / file}: tensor {name} is not in the local checkpoint")
            data = places[name].map("r+")
            try:
                apply(data, payload, index.encoding)
            except ValueError as error:
                raise WeightSyncError(f"{directory / file}: the change of tensor {name} {error}") from error
            found = checksum(data, index.checksum_format)
            if found != wanted:
                raise WeightSyncError(
                    f"{directory / file}: tensor {name} has {index.checksum_format} {found} after the change to "
                    f"version {expected}, {wanted} is expected: the delta or {places[name].file} is damaged"
                )
            patched += 1
    if patched != len(index.weight_map):
        raise WeightSyncError(f"{directory}: holds {patched} changes, its index names {len(index.weight_map)}")
    return patched


class _State:
    """Which version the local directory has: ``.weight_sync/state.json``, absent while files are touched.

    It counts until the host is started again, which may have lost what was written last.
    """

    def __init__(self, local: Path) -> None:
        self._path = local / _SYNC_DIR / "state.json"
        self._boot = _BOOT_ID.read_text().strip()

    def read(self, chain: str) -> int | None:
        """The version, if the directory belongs to ``chain`` and was left complete."""
        try:
            content = cast("dict[str, Any]", json.loads(self._path.read_text()))
            return int(content["version"]) if (content["chain"], content["boot"]) == (chain, self._boot) else None
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            logger.warning("%s cannot be read: the local checkpoint starts from the base again", self._path)
            return None

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)

    def write(self, chain: str, version: int) -> None:
        text = json.dumps({"version": version, "chain": chain, "boot": self._boot}) + "\n"
        write_atomically(self._path, lambda path: path.write_text(text))


@contextlib.contextmanager
def _locked(local: Path, timeout_seconds: float) -> Generator[None]:
    """Hold the lock of this host's directory; the kernel frees it when the holder dies."""
    _claim(local)
    deadline = time.monotonic() + timeout_seconds
    with (local / _SYNC_DIR / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(
                        f"waited {timeout_seconds:.0f} s for another pull into {local} to end"
                    ) from None
                time.sleep(_LOCK_POLL_SECONDS)
        yield


def _claim(local: Path) -> None:
    """Make the directory ours; one that holds somebody else's files is refused, because a pull replaces files."""
    sync = local / _SYNC_DIR
    # In this order: another pull of the host makes the one before any of the others.
    has_files = local.is_dir() and any(local.iterdir())
    if has_files and not sync.is_dir():
        raise WeightSyncError(
            f"--update-weight-local-checkpoint-dir {local} holds files that no weight sync wrote; name an empty or "
            "new directory"
        )
    sync.mkdir(parents=True, exist_ok=True)


def _copy_checkpoint(source: Path, local: Path) -> int:
    """Copy a model directory's files, with nothing of what was there before; returns the bytes."""
    for old in local.iterdir():
        if old.is_file():
            old.unlink()
    files = [path for path in sorted(source.iterdir()) if path.is_file() and not path.name.startswith(".")]
    needed = sum(path.stat().st_size for path in files)
    free = shutil.disk_usage(local).free
    if needed > free:
        raise WeightSyncError(
            f"{local} has {free / 2**30:.1f} GiB free, the checkpoint {source} needs {needed / 2**30:.1f} GiB"
        )
    for path in files:
        shutil.copyfile(path, local / path.name)
    for path in files:
        (local / path.name).chmod(0o644)
    return needed


def _wait_visible(path: Path, seconds: float) -> None:
    """Wait until a file that was published elsewhere can be seen here."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise WeightSyncError(
                f"{path} cannot be seen here after {seconds:.0f} s; --update-weight-disk-dir and --hf-checkpoint must "
                "be on a disk that every engine's host mounts at the same place, and published versions must stay"
            )
        time.sleep(_VISIBLE_POLL_SECONDS)


def _pre_read_hook(path: str | None) -> Callable[[str], object]:
    if path is None:
        return lambda _: None
    return cast("Callable[[str], object]", load_plugin(path, flag=PRE_READ_FLAG))


def _explained(error: Exception, local: Path) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return f"--update-weight-local-checkpoint-dir {local}: {error}"
    return str(error)
