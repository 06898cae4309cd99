"""Whose memory is on the devices that trainer and engines share.

Owns the order in which one side leaves and the other comes, and what is known of it: the engines' weights and the
trainer's parameters are the only two that meet, for a weight sync. In a split placement nothing moves. Tests
hold: the order, with real engines and training processes; an interrupted turn leaves no wrong belief about
who is awake.
"""

from __future__ import annotations

import logging
from typing import Protocol

from slime.config import ClusterConfig

logger = logging.getLogger(__name__)

GIB = float(1 << 30)

_WEIGHTS = "weights"
_REST = ("kv_cache", "cuda_graph")


class TrainerMemory(Protocol):
    """The part of the training processes that moves memory."""

    def sleep(self) -> None:
        """Leave the devices."""
        ...

    def hold_parameters(self) -> None:
        """Have the parameters on the devices and nothing else."""
        ...

    def wake_up(self, timeout_seconds: float | None = None) -> None:
        """Have everything on the devices."""
        ...

    def device_memory(self) -> dict[str, float]:
        """Bytes in use on the device of the first rank; empty on a CPU."""
        ...


class EngineMemory(Protocol):
    """The part of the engines that moves memory."""

    def release_memory(self) -> None:
        """Leave the devices; the weights are gone."""
        ...

    def resume_memory(self, tags: list[str]) -> None:
        """Take device memory back."""
        ...


class DeviceTurns:
    """Trainer and engines of one run, taking turns.

    Args:
        cluster: Which of them moves.
        trainer: None without training.
        engines: None without generation. With ``--offload-rollout`` they have released their memory.
        releases_trainer: Whether its processes end instead of moving their memory.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        trainer: TrainerMemory | None,
        engines: EngineMemory | None,
        *,
        releases_trainer: bool = False,
    ) -> None:
        self._moves_trainer = trainer is not None and (bool(cluster.offload_train) or releases_trainer)
        self._moves_engines = engines is not None and bool(cluster.offload_rollout)
        self._measures = cluster.device == "cuda" and (self._moves_trainer or self._moves_engines)
        self._trainer = trainer
        self._engines = engines
        self._memory: dict[str, float] = {}
        self.trainer_awake = True
        self._trainer_asleep = False
        self._engine_weights = self._engine_rest = not self._moves_engines

    def to_trainer(self) -> None:
        """Engines leave, everything of the trainer comes."""
        if self._moves_engines and (self._engine_weights or self._engine_rest):
            assert self._engines is not None
            self._engine_weights = self._engine_rest = False
            self._engines.release_memory()
            self._note("engines_released")
        self.wake_trainer()

    def wake_trainer(self, timeout_seconds: float | None = None) -> None:
        """Bring back everything of the trainer, wherever the engines are."""
        if self._trainer is None or self.trainer_awake:
            return
        self._trainer_asleep = False
        self._trainer.wake_up(timeout_seconds)
        self.trainer_awake = True
        self._note("trainer_awake")

    def meet(self) -> None:
        """The engines' weights and the trainer's parameters, and nothing else of theirs that can move."""
        if self._moves_trainer:
            assert self._trainer is not None
            self.trainer_awake = self._trainer_asleep = False
            self._trainer.hold_parameters()
        if not self._engine_weights:
            assert self._engines is not None
            self._engines.resume_memory([_WEIGHTS])
            self._engine_weights = True
        self._note("weights_meet")

    def to_engines(self) -> None:
        """The trainer leaves, the rest of the engines comes."""
        if self._moves_trainer and not self._trainer_asleep:
            assert self._trainer is not None
            self.trainer_awake = False
            self._trainer.sleep()
            self._trainer_asleep = True
            self._note("trainer_asleep")
        if not self._engine_rest:
            assert self._engines is not None
            self._engines.resume_memory(list(_REST))
            self._engine_rest = True
            self._note("engines_awake")

    def released_tags(self) -> tuple[str, ...]:
        """What engines that move have given away of their memory."""
        weights = () if self._engine_weights else (_WEIGHTS,)
        return weights if self._engine_rest else (*weights, *_REST)

    def make_room(self) -> None:
        """The trainer leaves while engines are away, since one that starts anew takes all of its memory at first."""
        if self._moves_trainer and not self._trainer_asleep and not self._engine_rest:
            assert self._trainer is not None
            self.trainer_awake = False
            self._trainer.sleep()
            self._trainer_asleep = True

    def take_memory(self) -> dict[str, float]:
        """``memory/*`` of the moments since the last call; empty where nothing moves, and on a CPU."""
        taken, self._memory = self._memory, {}
        return taken

    def _note(self, moment: str) -> None:
        """Note the memory in use now."""
        if not self._measures or self._trainer is None:
            return
        memory = self._trainer.device_memory()
        self._memory |= {f"memory/{moment}_{name}": value for name, value in memory.items()}
        logger.info("%s: %s", moment.replace("_", " "), ", ".join(f"{k} {v / GIB:.2f} GiB" for k, v in memory.items()))
