"""The configuration sections, one frozen dataclass per concern.

A field is declared here once; its flag, ``--help`` and the reference page derive from it. Field names
are unique over all sections, because plug-ins see them as one flat ``args``.
"""

from slime.config.sections.algorithm import AlgorithmConfig
from slime.config.sections.checkpoint import CheckpointConfig
from slime.config.sections.cluster import ClusterConfig
from slime.config.sections.data import DataConfig
from slime.config.sections.debug import DebugConfig
from slime.config.sections.engine import EngineConfig
from slime.config.sections.evaluation import EvalConfig
from slime.config.sections.reporting import LoggingConfig
from slime.config.sections.reward import RewardConfig
from slime.config.sections.rollout import RolloutConfig
from slime.config.sections.train import TrainConfig
from slime.config.sections.weights import WeightsConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DebugConfig",
    "EngineConfig",
    "EvalConfig",
    "LoggingConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainConfig",
    "WeightsConfig",
]
