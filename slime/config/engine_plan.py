"""Which engine processes a run has and on which slots: the one place of that arithmetic.

From the configuration to a tuple of planned engines and routers; nothing here starts anything or knows Ray. Tests
hold: every slot is given out once, in order, and the plan of every mode.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.config.deployment import ModelDeployment, ServerGroup
from slime.config.schema import Config

DEFAULT_MODEL = "default"
"""Name of the model that is served without ``--sglang-config``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process of an engine, on one node.

    Args:
        node_rank: Which of the engine's nodes; only 0 serves HTTP.
        slots: Slots of the run that it uses, neighbours on one node.
    """

    node_rank: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """One engine.

    Args:
        index: Number over all models, in the order of the slots.
        model: Name of the model it serves.
        model_path: Its first weights.
        worker_type: ``regular``, ``prefill``, ``decode`` or ``encoder``.
        updatable: Whether it gets the trainer's weights.
        processes: One per node, by node rank.
        trainer_ranks: Training processes on the same slots; empty when it shares none.
        offloaded: Whether it gives its memory to the trainer while that works.
        seed: Of sampling.
        overrides: Engine arguments of its group.
    """

    index: int
    model: str
    model_path: str
    worker_type: str
    updatable: bool
    processes: tuple[PlannedProcess, ...]
    trainer_ranks: tuple[int, ...]
    offloaded: bool
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """What messages and logs call it."""
        return f"engine {self.index}"

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of all its processes."""
        return tuple(slot for process in self.processes for slot in process.slots)

    @property
    def num_gpus(self) -> int:
        """GPUs (on a CPU: processes): tensor-parallel times pipeline-parallel size."""
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRouter:
    """The router of one model.

    Args:
        model: The model.
        disaggregated: Whether prefill and decode are different engines.
        default: Whether it is the one that requests without a model go to.
    """

    model: str
    disaggregated: bool
    default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """All engines and routers of a run.

    Args:
        engines: By index.
        routers: One per model, in the order of the models.
        reserved: Slots that placeholders keep free.
    """

    engines: tuple[PlannedEngine, ...]
    routers: tuple[PlannedRouter, ...]
    reserved: tuple[int, ...] = ()

    @property
    def default_router(self) -> PlannedRouter:
        """The router of the first model that gets the trainer's weights."""
        return next(router for router in self.routers if router.default)


def deployed_models(config: Config) -> tuple[ModelDeployment, ...]:
    """The models that are served; without a deployment one, on all rollout slots or by engines that already run."""
    if config.deployment:
        return config.deployment
    if config.external_engines:
        types = [(engine.worker_type, engine.num_gpus) for engine in config.external_engines]
        groups = tuple(ServerGroup(worker_type=kind, num_gpus=n, num_gpus_per_engine=n) for kind, n in types)
        return (ModelDeployment(name=DEFAULT_MODEL, server_groups=groups),)
    per_engine = config.cluster.rollout_num_gpus_per_engine
    num_gpus = len(config.layout.rollout) // per_engine * per_engine
    groups = (ServerGroup(num_gpus=num_gpus, num_gpus_per_engine=per_engine),) if num_gpus else ()
    return (ModelDeployment(name=DEFAULT_MODEL, server_groups=groups),)


def gets_weights(model: ModelDeployment, hf_checkpoint: str | None) -> bool:
    """Whether the trainer's weights are sent to a model: as it says, else if it starts from the same checkpoint."""
    if model.update_weights is not None:
        return model.update_weights
    if model.model_path is None or hf_checkpoint is None:
        return model.model_path is None
    return os.path.realpath(model.model_path) == os.path.realpath(hf_checkpoint)


def plan_engines(config: Config) -> EnginePlan:
    """Give every engine that is started its slots, in the order of models and groups."""
    models = deployed_models(config)
    updatable = [gets_weights(model, config.rollout.hf_checkpoint) for model in models]
    default = updatable.index(True) if True in updatable else 0
    routers = tuple(
        PlannedRouter(model=m.name, disaggregated=bool(m.worker_types & {"prefill", "decode"}), default=i == default)
        for i, m in enumerate(models)
    )
    free = list(config.layout.rollout)
    engines: list[PlannedEngine] = []
    reserved: list[int] = []
    for model, updated in zip(models, updatable, strict=True):
        for group in model.server_groups:
            slots, free = free[: group.num_gpus], free[group.num_gpus :]
            if group.worker_type == "placeholder":
                reserved += slots
            else:
                engines += _engines(config, model, group, slots, len(engines), updated)
    return EnginePlan(engines=tuple(engines), routers=routers, reserved=tuple(reserved))


def _engines(
    config: Config, model: ModelDeployment, group: ServerGroup, slots: list[int], first_index: int, updated: bool
) -> list[PlannedEngine]:
    per_engine = group.per_engine(config.cluster.rollout_num_gpus_per_engine)
    engines: list[PlannedEngine] = []
    for number in range(len(slots) // per_engine):
        own = slots[number * per_engine : (number + 1) * per_engine]
        ranks = tuple(config.layout.trainer.index(slot) for slot in own if slot in config.layout.trainer)
        engines.append(
            PlannedEngine(
                index=first_index + number,
                model=model.name,
                model_path=model.model_path or config.rollout.hf_checkpoint or "",
                worker_type=group.worker_type,
                updatable=updated and group.worker_type != "encoder",  # an encoder server takes no weights
                processes=_processes(own, config.cluster.num_gpus_per_node),
                trainer_ranks=ranks,
                offloaded=bool(config.cluster.offload_rollout) and bool(ranks) and group.worker_type != "encoder",
                seed=config.rollout.rollout_seed + own[0] - config.layout.rollout[0],
                overrides=group.overrides,
            )
        )
    return engines


def _processes(slots: list[int], per_node: int) -> tuple[PlannedProcess, ...]:
    """An engine that is larger than a node has one process per node."""
    size = len(slots) if len(slots) <= per_node else per_node
    parts = [tuple(slots[i : i + size]) for i in range(0, len(slots), size)]
    return tuple(PlannedProcess(node_rank=rank, slots=part) for rank, part in enumerate(parts))
