"""Configuration of a run: sections, command line, foreign flag families, the flat view for plug-ins."""

from slime.config.eval_datasets import EvalDatasetConfig
from slime.config.families import FlagFamily, MegatronConfig, MegatronContext
from slime.config.hf import HfModel
from slime.config.schema import Config
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
from slime.config.view import ArgsView

__all__ = [
    "AlgorithmConfig",
    "ArgsView",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "EngineConfig",
    "EvalConfig",
    "EvalDatasetConfig",
    "FlagFamily",
    "HfModel",
    "LoggingConfig",
    "MegatronConfig",
    "MegatronContext",
    "RewardConfig",
    "RolloutConfig",
    "TrainConfig",
    "WeightsConfig",
]
