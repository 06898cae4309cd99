"""How new weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig(Section):
    """Weight synchronisation."""

    update_weight_mode: Literal["full", "delta"] = flag("full", doc="Send all weights or only what changed.")
    update_weight_transport: Literal["nccl", "broadcast", "disk"] = flag(
        "nccl",
        doc="Carrier of a full synchronisation. nccl: engines that share memory with the trainer (--colocate; on a CPU "
        "those of the same machine) read it there, the others get an NCCL broadcast. broadcast: a process group in any "
        "case, over gloo on a CPU. disk: files, whole checkpoints or (--update-weight-mode delta) what changed.",
    )
    update_weight_disk_dir: str | None = flag(
        None, doc="Directory of published versions, on a disk that the trainer writes and every engine's host reads."
    )
    update_weight_disk_keep_files: bool = flag(
        False, doc="Keep whole checkpoints on disk after the engines have loaded them; deltas always stay."
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag(
        "xor", doc="Form of a delta: old ^ new of every byte, or positions and values of the bytes that changed."
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = flag(
        "xxh3-128", doc="Checksum per tensor in delta files; each host compares it after patching."
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        doc="Directory on each engine's host for a checkpoint of its own: deltas patch it, whole checkpoints are "
        "copied into it. Empty or new at first.",
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        doc="Hook (args, version_dir, rollout_engines), called on every training rank after a version is written.",
    )
    sglang_custom_pull_weights_pre_read_hook: str | None = flag(
        None,
        doc="Hook (directory), called on each engine's host before it reads a published version or the checkpoint "
        "that deltas start from.",
    )
    update_weight_buffer_size: int = flag(536870912, at_least=1, doc="Bytes of one bucket of weights.")
    update_weights_interval: int = flag(1, at_least=1, doc="Synchronise the engines after every N trained rollouts.")
    update_weight_pause_mode: Literal["auto", "retract", "abort", "in_place"] = flag(
        "auto",
        doc="What becomes of requests that run while weights change: retract has the engine compute their keys and "
        "values again, abort ends them and the rollout asks for the rest, in_place keeps what the old weights "
        "computed. auto: retract where the engine can, else abort.",
    )
    update_weights_during_rollout: bool = flag(
        False,
        doc="train_async.py synchronises in the middle of a rollout instead of waiting for its end; its samples then "
        "have tokens of several weights.",
    )
    check_weight_update_equal: bool = flag(
        False,
        doc="Show that updates reach every tensor: at the first synchronisation engines forget what they loaded and "
        "must get the same back, at every later one all tensors are verified by checksum, not a part of them in turn. "
        "Only for runs that start from --hf-checkpoint.",
    )
    weight_sync_timeout_seconds: float = flag(600.0, above=0, doc="Bound on one synchronisation of all engines.")
