"""A configuration while its rules run: sections that may still be replaced, problems, notices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slime.config.deployment import ModelDeployment
from slime.config.external import ExternalEngine
from slime.config.flags import flag_specs
from slime.config.hf import HfModel
from slime.config.schema import SECTIONS
from slime.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DebugConfig,
    EngineConfig,
    EvalConfig,
    LoggingConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    WeightsConfig,
)
from slime.errors import SlimeError

Loop = Literal["in turn", "ahead"]
"""How rollouts and training follow each other: ``train.py``'s way, and ``train_async.py``'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a rule may know about the machine and the program; passed in, so that tests can choose it.

    Attributes:
        num_cuda_devices: CUDA devices of this machine that the process may use.
        sglang_installed: Whether the SGLang package can be imported.
        tensorboard_installed: Whether the tensorboard package can be imported.
        query_engines: Asks engines that already run, by their URLs, what they say of themselves; an error for each that
            does not answer.
        joins_cluster: Whether the run joins a Ray cluster that may have other machines.
        loop: The program's loop; None for a program of a user's own.
        start_time: ``YYYYmmdd_HHMMSS``, names a run that nobody named.
    """

    num_cuda_devices: int = 0
    sglang_installed: bool = False
    tensorboard_installed: bool = False
    query_engines: Callable[[Sequence[str]], Sequence[Mapping[str, Any] | SlimeError]] | None = None
    joins_cluster: bool = False
    loop: Loop | None = None
    start_time: str = "run"


@dataclass(slots=True, kw_only=True)
class Draft:
    """What rules read and write. A rule replaces a whole section, never a field of it.

    ``given`` holds the field names the user set, on the command line or in ``--custom-config-path``.
    ``megatron_flags`` holds the Megatron flags on the command line.
    ``external_info`` holds what engines that already run said of themselves, by URL.
    """

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    hf: HfModel | None = None
    deployment: tuple[ModelDeployment, ...] = ()
    external_engines: tuple[ExternalEngine, ...] = ()
    external_info: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    surroundings: Surroundings
    given: frozenset[str] = frozenset()
    megatron_flags: frozenset[str] = frozenset()
    problems: list[str] = field(default_factory=list[str])
    notices: list[str] = field(default_factory=list[str])

    def flag_of(self, dest: str) -> str:
        """The flag behind a field name, for messages."""
        for name, section in SECTIONS.items():
            for spec in flag_specs(section, name):
                if spec.dest == dest:
                    return spec.name
        raise KeyError(dest)
