"""Which slots a run occupies: the one place of that arithmetic.

A slot is one GPU, or on a CPU one process. Tests hold: the layouts of every mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.sections import ClusterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Slots of one run. ``trainer`` and ``rollout`` are slot numbers; colocated, they overlap."""

    num_slots: int
    trainer: tuple[int, ...]
    rollout: tuple[int, ...]


def plan_layout(
    cluster: ClusterConfig, *, debug_train_only: bool, debug_rollout_only: bool, external_engines: bool
) -> Layout:
    """Lay out trainer and rollout slots.

    Split: the rollout slots follow the trainer's. Colocated: both start at 0, and the larger side
    decides the total. Debug modes reserve one side only; external engines need no slots.

    Args:
        cluster: Counts and mode.
        debug_train_only: No engines.
        debug_rollout_only: No trainer.
        external_engines: Engines run elsewhere.
    """
    num_trainer = 0 if debug_rollout_only else cluster.world_size
    num_rollout = 0 if debug_train_only or external_engines else (cluster.rollout_num_gpus or 0)
    offset = 0 if cluster.colocate else num_trainer
    return Layout(
        num_slots=max(num_trainer, offset + num_rollout),
        trainer=tuple(range(num_trainer)),
        rollout=tuple(range(offset, offset + num_rollout)),
    )
