"""The updaters that work through files, from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from slime.config import ArgsView, Config
from slime.plugins import load_plugin
from slime.weights.control import EngineCalls
from slime.weights.delta import DeltaForm, DeltaPublisher
from slime.weights.disk import CheckpointPublisher
from slime.weights.from_files import POST_WRITE_FLAG, FileSettings, FileUpdater, PostWriteHook, Publisher
from slime.weights.pause import pause_mode_for
from slime.weights.streamed import Verifier


def file_updater(
    config: Config, *, rank: int, world_size: int, verifier: Callable[[EngineCalls], Verifier]
) -> FileUpdater:
    """One rank's part of the disk transport, whole or as deltas.

    Args:
        config: The resolved configuration.
        rank: This process.
        world_size: Training processes.
        verifier: Makes the verifier of the connected engines.

    Raises:
        PluginError: The hook after writing cannot be loaded.
    """
    settings = FileSettings(
        timeout_seconds=config.weights.weight_sync_timeout_seconds,
        post_write=_post_write(config),
        pause_mode=partial(pause_mode_for, config),
        verifier=verifier,
    )
    return FileUpdater(settings, partial(_publisher, config), rank=rank, world_size=world_size)


def _publisher(config: Config) -> Publisher:
    weights = config.weights
    assert weights.update_weight_disk_dir is not None, "checked with the command line"
    assert config.hf is not None, "a training configuration has a checkpoint"
    disk_dir, checkpoint = Path(weights.update_weight_disk_dir), Path(config.hf.path)
    pre_read_hook = weights.sglang_custom_pull_weights_pre_read_hook
    if weights.update_weight_mode == "delta":
        form = DeltaForm(
            encoding=weights.update_weight_delta_encoding, checksum_format=weights.update_weight_delta_checksum
        )
        return DeltaPublisher(disk_dir, checkpoint, form, pre_read_hook=pre_read_hook)
    return CheckpointPublisher(
        disk_dir,
        checkpoint,
        keep_files=weights.update_weight_disk_keep_files,
        is_pulled=weights.update_weight_local_checkpoint_dir is not None,
        pre_read_hook=pre_read_hook,
    )


def _post_write(config: Config) -> PostWriteHook | None:
    path = config.weights.custom_update_weight_post_write_path
    if path is None:
        return None
    hook, args = cast("Callable[..., object]", load_plugin(path, flag=POST_WRITE_FLAG)), ArgsView(config)
    return lambda directory, engines: hook(args, directory, engines)
