"""``Config``: all sections of one run, frozen, picklable, and equal to itself after JSON."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from slime.config.deployment import ModelDeployment
from slime.config.engine_flags import SGLANG_SECRETS
from slime.config.external import ExternalEngine
from slime.config.families import MegatronConfig
from slime.config.flags import FlagSpec, Section, flag_specs, unwrap_optional
from slime.config.hf import HfModel
from slime.config.layout import Layout, plan_layout
from slime.config.roles import Role, RoleConfig
from slime.config.router_flags import ROUTER_SECRETS
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

SECTIONS: Mapping[str, type[Section]] = {
    "cluster": ClusterConfig,
    "train": TrainConfig,
    "weights": WeightsConfig,
    "rollout": RolloutConfig,
    "data": DataConfig,
    "eval": EvalConfig,
    "algorithm": AlgorithmConfig,
    "checkpoint": CheckpointConfig,
    "reward": RewardConfig,
    "engine": EngineConfig,
    "logging": LoggingConfig,
    "debug": DebugConfig,
}
"""Attribute of ``Config`` -> section class, in the order of the reference page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a run is told, resolved. Nothing writes to it; a variant is a ``replace()``.

    ``sglang`` and ``router`` hold what the user gave for the engine and the router, by their own
    attribute names without prefix.
    ``custom`` holds names from ``--custom-config-path`` that no flag has.
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
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    sglang: Mapping[str, Any] = field(default_factory=dict[str, Any])
    router: Mapping[str, Any] = field(default_factory=dict[str, Any])
    custom: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hf: HfModel | None = None
    deployment: tuple[ModelDeployment, ...] = ()
    """The models of ``--sglang-config`` or ``--prefill-num-servers``; empty: one model on all rollout slots."""
    external_engines: tuple[ExternalEngine, ...] = ()
    """Engines that already run, as they described themselves."""
    role: Role = "actor"
    """Which model a training process holds with this configuration."""
    critic: RoleConfig | None = None
    """What the critic's configuration has of its own (see ``roles.critic_config``); None without a critic."""
    notices: tuple[str, ...] = ()
    """Lines an operator should read once: defaults that were filled in, settings without effect."""

    @property
    def num_engines(self) -> int:
        """Engines of all models, those that already run included; 0 without any."""
        if self.external_engines:
            return len(self.external_engines)
        per_engine = self.cluster.rollout_num_gpus_per_engine
        if self.deployment:
            return sum(g.num_engines(per_engine) for model in self.deployment for g in model.server_groups)
        return (self.cluster.rollout_num_gpus or 0) // per_engine

    @property
    def layout(self) -> Layout:
        """Slots of trainer and engines."""
        return plan_layout(
            self.cluster,
            debug_train_only=self.debug.debug_train_only,
            debug_rollout_only=self.debug.debug_rollout_only,
            external_engines=self.rollout.rollout_external_engine_addrs is not None,
        )

    @property
    def num_steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        return self.data.num_steps_per_rollout or 1

    def to_json(self) -> str:
        """The configuration as indented JSON with sorted keys; secrets are left out."""
        document = _encode(self)
        for section, names in _secret_names().items():
            for name in names:
                document[section].pop(name, None)
        return json.dumps(document, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Inverse of ``to_json``, except that secrets are unset.

        Raises:
            ConfigError: A value is outside what its flag accepts.
            ValueError: Not such a document.
        """
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("a configuration document is a JSON object")
        return _decode(cls, data)


def all_flag_specs() -> tuple[FlagSpec, ...]:
    """Every field of every section, derived ones (form ``none``) included."""
    return tuple(spec for name, section in SECTIONS.items() for spec in flag_specs(section, name))


def _secret_names() -> Mapping[str, Collection[str]]:
    """Attribute of ``Config`` -> entries of it that must not be written."""
    secrets: dict[str, Collection[str]] = {"sglang": SGLANG_SECRETS, "router": ROUTER_SECRETS}
    for name, section in SECTIONS.items():
        secrets[name] = [spec.dest for spec in flag_specs(section, name) if spec.info.secret]
    return secrets


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in typing.cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, frozenset | set):
        return sorted(typing.cast("frozenset[str]", value))
    if isinstance(value, tuple | list):
        return [_encode(v) for v in typing.cast("list[Any]", value)]
    return value


def _decode(hint: Any, value: Any) -> Any:
    """Rebuild a value of the annotated type from its JSON form."""
    hint, _ = unwrap_optional(hint)
    if value is None:
        return None
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _decode(hints[name], v) for name, v in value.items()})
    if get_origin(hint) is tuple:
        return tuple(_decode(get_args(hint)[0], v) for v in value)
    if get_origin(hint) is frozenset:
        return frozenset(value)
    return value
