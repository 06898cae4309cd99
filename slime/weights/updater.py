"""Which way the weights take to the engines, decided in one place.

Owns the protocol of all ways and the choice between them. Tests hold: the first matching row of the table in
``docs/weight_sync.md`` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from slime.config import Config
from slime.weights.endpoint import EngineEndpoint
from slime.weights.file_updaters import file_updater
from slime.weights.pause import pause_mode_for
from slime.weights.report import Bucket, Receivers, SyncReport
from slime.weights.streamed import StreamedUpdater, StreamSettings
from slime.weights.verify import Verifiers


class WeightUpdater(Protocol):
    """One rank's part in bringing engines to new weights. All methods are collective over the training ranks."""

    @property
    def receivers(self) -> Receivers:
        """Which ranks the buckets must hold tensors on."""
        ...

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Take these engines from now on, instead of those before.

        Raises:
            EngineError: An engine refused, or cannot be reached.
            WaitTimeoutError: One did not answer in time.
        """
        ...

    def update(self, buckets: Iterable[Bucket], version: str) -> SyncReport:
        """Bring every engine to new weights; every rank exhausts ``buckets``.

        Args:
            buckets: (Hugging Face name, tensor) pairs in any order; consumed once.
            version: Name of the new weights; comes back with every answer of an engine.

        Returns:
            What was done; of rank 0, others may say less.

        Raises:
            WeightSyncError: An engine refused a tensor, or holds other values than were sent.
            EngineError: An engine cannot be reached.
            WaitTimeoutError: An engine or a rank did not answer in time.
        """
        ...

    def close(self) -> None:
        """Free what is held; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRank:
    """A rank's place among the training processes."""

    rank: int
    world_size: int


def build_updater(config: Config, place: TrainerRank) -> WeightUpdater:
    """This rank's part of the way that the configuration asks for.

    Args:
        config: The resolved configuration.
        place: The rank.
    """
    weights = config.weights
    assert config.hf is not None, "a training configuration has a checkpoint"
    verifiers = Verifiers(model=config.hf.config, check_equal=weights.check_weight_update_equal)
    if weights.update_weight_transport == "disk":  # whole checkpoints, or deltas
        return file_updater(config, rank=place.rank, world_size=place.world_size, verifier=verifiers.of)
    is_cuda = config.cluster.device == "cuda"
    settings = StreamSettings(
        is_cuda=is_cuda,
        shares_memory=weights.update_weight_transport != "broadcast" and (config.cluster.colocate or not is_cuda),
        timeout_seconds=weights.weight_sync_timeout_seconds,
        bucket_bytes=weights.update_weight_buffer_size,
        pause_mode=partial(pause_mode_for, config),
        verifier=verifiers.of,
    )
    return StreamedUpdater(settings, rank=place.rank, world_size=place.world_size)
