"""Weights through files: which flags need which, and directories that cannot be what they are named for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from slime.config.draft import Draft

_OF_DISK = ("update_weight_disk_dir", "update_weight_disk_keep_files", "custom_update_weight_post_write_path")
_OF_PULLS = ("sglang_custom_pull_weights_pre_read_hook",)
_OF_DELTA = ("update_weight_delta_encoding", "update_weight_delta_checksum")


def check_weight_files(draft: Draft) -> None:
    """Check the disk transport and deltas."""
    weights = draft.weights
    is_delta, is_disk = weights.update_weight_mode == "delta", weights.update_weight_transport == "disk"
    if is_delta:
        _delta(draft)
    if is_disk:
        _disk(draft)
        _local(draft)
    else:
        idle = (*_OF_DISK, "update_weight_local_checkpoint_dir")
        _idle(draft, idle, "without --update-weight-transport disk")
    if weights.update_weight_local_checkpoint_dir is None:
        _idle(draft, _OF_PULLS, "without --update-weight-local-checkpoint-dir")
    if not is_delta:
        _idle(draft, _OF_DELTA, "without --update-weight-mode delta")
    elif weights.update_weight_disk_keep_files:
        draft.notices.append(
            "--update-weight-disk-keep-files: no effect with --update-weight-mode delta, which always keeps its files: "
            "an engine that is started again needs all of them"
        )


def _delta(draft: Draft) -> None:
    weights = draft.weights
    if weights.update_weight_transport != "disk":
        draft.problems.append(
            f"--update-weight-mode delta requires --update-weight-transport=disk, found "
            f"{weights.update_weight_transport}; deltas travel as files"
        )
    if draft.cluster.colocate:
        draft.problems.append(
            "--update-weight-mode delta is not supported with --colocate, where engines read the trainer's memory; "
            "leave out one of them"
        )
    if weights.update_weight_local_checkpoint_dir is None:
        draft.problems.append(
            "--update-weight-mode delta requires --update-weight-local-checkpoint-dir: a directory on each engine's "
            "host for the checkpoint that deltas patch"
        )


def _disk(draft: Draft) -> None:
    disk_dir = draft.weights.update_weight_disk_dir
    if disk_dir is None:
        draft.problems.append(
            "--update-weight-transport disk needs --update-weight-disk-dir: a directory that the trainer writes and "
            "every engine's host reads"
        )
    else:
        _must_be_directory(
            draft, "--update-weight-disk-dir", disk_dir, written_here=not draft.surroundings.joins_cluster
        )
        _is_no_source(draft, disk_dir)


def _is_no_source(draft: Draft, disk_dir: str) -> None:
    """Published versions must lie where nothing else is written or read."""
    flag, real = "--update-weight-disk-dir", Path(os.path.realpath(disk_dir))
    model, local = draft.rollout.hf_checkpoint, draft.weights.update_weight_local_checkpoint_dir
    if model is not None and real == Path(os.path.realpath(model)):
        draft.problems.append(f"{flag} {disk_dir}: is --hf-checkpoint; name a directory for published versions alone")
    if local is not None and Path(os.path.realpath(local)) in real.parents:
        draft.problems.append(
            f"{flag} {disk_dir}: lies in --update-weight-local-checkpoint-dir {local}, where each host keeps its own "
            "checkpoint; name another"
        )


def _local(draft: Draft) -> None:
    local = draft.weights.update_weight_local_checkpoint_dir
    if local is None:
        return
    flag = "--update-weight-local-checkpoint-dir"
    _must_be_directory(draft, flag, local)
    path = Path(local).absolute()
    for other, value in (
        ("--update-weight-disk-dir", draft.weights.update_weight_disk_dir),
        ("--hf-checkpoint", draft.rollout.hf_checkpoint),
    ):
        if value is not None and (path == Path(value).absolute() or path.is_relative_to(Path(value).absolute())):
            draft.problems.append(f"{flag} {local}: lies in {other} {value}, whose files it would change; name another")
    if draft.rollout.rollout_external_engine_addrs is not None:
        draft.problems.append(
            f"{flag}: no process of this run is on the host of an engine of --rollout-external-engine-addrs, which "
            "could write there; leave it out"
        )


def _must_be_directory(draft: Draft, flag: str, value: str, *, written_here: bool = False) -> None:
    existing = next(path for path in (Path(value).absolute(), *Path(value).absolute().parents) if path.exists())
    if not existing.is_dir():
        draft.problems.append(f"{flag} {value}: {existing} is a file; name a directory")
    elif written_here:
        try:  # the only sure answer: permissions do not tell for root, nor on every file system
            tempfile.TemporaryDirectory(dir=existing, prefix=".slime-").cleanup()
        except OSError as error:
            draft.problems.append(f"{flag} {value}: {existing} cannot be written ({error.strerror}); name another")


def _idle(draft: Draft, names: tuple[str, ...], why: str) -> None:
    idle = [draft.flag_of(name) for name in names if name in draft.given]
    if idle:
        draft.notices.append(f"{', '.join(idle)}: no effect {why}")
