"""What the configuration needs from a family of foreign flags, and what it gives it.

Megatron's, the engine's and the router's flags are parsed by parsers that know them. This module owns
the protocol between those parsers and ``parse``, and the typed view of Megatron's values; it imports
none of the foreign packages. ``slime.cli`` passes the implementations in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.config.hf import HfModel
from slime.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    RolloutConfig,
    TrainConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronContext:
    """Everything slime knows when Megatron's flags are parsed; all sections are resolved.

    ``hf`` is None only with ``--debug-rollout-only``. Flags that slime declares itself and Megatron
    knows too (``--micro-batch-size``, ``--global-batch-size``, ``--load``, ``--ckpt-step``,
    ``--save``, ``--async-save``, ``--no-save-optim``, ``--distributed-backend``, ``--calculate-per-token-loss``,
    ``--mtp-num-layers``, ``--padded-vocab-size``, ...) do not reach the Megatron family as tokens:
    it takes their values from the sections here.
    """

    hf: HfModel | None
    cluster: ClusterConfig
    train: TrainConfig
    data: DataConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    checkpoint: CheckpointConfig
    default_seed: int = 1234
    default_lr: float = 1e-6
    default_clip_grad: float = 1.0

    @property
    def world_size(self) -> int:
        """Number of training processes."""
        return self.cluster.world_size

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.cluster.device

    @property
    def precision(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``."""
        return self.train.precision

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass."""
        return self.data.micro_batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        if self.data.global_batch_size is not None:
            return self.data.global_batch_size
        return self.data.rollout_batch_size * self.data.n_samples_per_prompt

    @property
    def num_rollout(self) -> int | None:
        """Rollouts in total; None when the number follows from ``--num-epoch``."""
        return self.data.num_rollout

    @property
    def n_samples_per_prompt(self) -> int:
        """Samples per group."""
        return self.data.n_samples_per_prompt

    @property
    def train_iters(self) -> int | None:
        """Optimizer steps of the whole run; None when ``--num-epoch`` decides."""
        if self.data.num_rollout is None:
            return None
        samples = self.data.num_rollout * self.data.rollout_batch_size * self.data.n_samples_per_prompt
        return samples // self.global_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """Megatron's resolved values.

    Attributes:
        argv: The tokens of the command line that belong to Megatron.
        explicit: Destinations the user gave, as opposed to defaults and derived values.
        values: The full, validated Megatron namespace as plain JSON data (a dtype as its name).
        notices: Lines an operator should read once, for example a forced default.
    """

    argv: tuple[str, ...] = ()
    explicit: frozenset[str] = frozenset()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", plain_json(self.values, "Megatron value"))

    def __getitem__(self, name: str) -> Any:
        """One Megatron value by its established attribute name.

        Raises:
            KeyError: Megatron has no such value.
        """
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """One Megatron value, or ``default`` when there is none."""
        return self.values.get(name, default)

    def _int(self, name: str, default: int) -> int:
        value = self.values.get(name)
        return default if value is None else int(value)

    @property
    def tensor_model_parallel_size(self) -> int:
        """Processes that share every layer (TP)."""
        return self._int("tensor_model_parallel_size", 1)

    @property
    def pipeline_model_parallel_size(self) -> int:
        """Pipeline stages (PP)."""
        return self._int("pipeline_model_parallel_size", 1)

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Model chunks per pipeline stage; None without interleaving."""
        value = self.values.get("virtual_pipeline_model_parallel_size")
        return None if value is None else int(value)

    @property
    def context_parallel_size(self) -> int:
        """Processes that share every sequence (CP)."""
        return self._int("context_parallel_size", 1)

    @property
    def expert_model_parallel_size(self) -> int:
        """Processes that share the experts (EP)."""
        return self._int("expert_model_parallel_size", 1)

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Processes that share one expert (ETP)."""
        return self._int("expert_tensor_parallel_size", self.tensor_model_parallel_size)

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and dropout are split over TP along the sequence."""
        return bool(self.values.get("sequence_parallel", False))

    @property
    def use_distributed_optimizer(self) -> bool:
        """Whether optimizer state is sharded over data parallel ranks."""
        return bool(self.values.get("use_distributed_optimizer", True))

    @property
    def seed(self) -> int:
        """Seed of the trainer."""
        return self._int("seed", 1234)

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return float(self.values.get("lr", 1e-6))

    @property
    def clip_grad(self) -> float:
        """Bound on the global gradient norm."""
        return float(self.values.get("clip_grad", 1.0))

    @property
    def seq_length(self) -> int:
        """Nominal sequence length; batches are packed, so it is no limit."""
        return self._int("seq_length", 4096)

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass."""
        return self._int("micro_batch_size", 1)

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return int(self.values["num_layers"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.values["hidden_size"])

    @property
    def ffn_hidden_size(self) -> int:
        """Width of a dense MLP."""
        return int(self.values["ffn_hidden_size"])

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return int(self.values["num_attention_heads"])

    @property
    def num_query_groups(self) -> int:
        """Key-value heads."""
        return self._int("num_query_groups", self.num_attention_heads)

    @property
    def kv_channels(self) -> int:
        """Width of one head."""
        return self._int("kv_channels", self.hidden_size // self.num_attention_heads)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return int(self.values["vocab_size"])

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.values["padded_vocab_size"])

    @property
    def untie_embeddings_and_output_weights(self) -> bool:
        """Whether the output head has weights of its own."""
        return bool(self.values.get("untie_embeddings_and_output_weights", False))


class FlagFamily(Protocol):
    """Megatron's side of the command line, as ``parse`` needs it."""

    def flag_names(self) -> frozenset[str]:
        """Every flag of the family with its leading dashes, aliases included."""
        ...

    def parse(self, argv: Sequence[str], context: MegatronContext) -> MegatronConfig:
        """Parse the family's tokens, derive what was not given, and check the result.

        Args:
            argv: Tokens of this family only; every leading flag is one of ``flag_names()``.
            context: What slime resolved before.

        Raises:
            ConfigError: With all problems found, each naming the flag and the remedy.
        """
        ...


class PrefixFamily(Protocol):
    """The engine's or the router's flags, which carry a prefix on our command line."""

    @property
    def prefix(self) -> str:
        """``--sglang-`` or ``--router-``."""
        ...

    def flag_names(self) -> frozenset[str]:
        """Every accepted flag, with the prefix."""
        ...

    def refused(self) -> Mapping[str, str]:
        """Flags that slime sets itself -> what to use instead."""
        ...

    def parse(self, groups: Sequence[Sequence[str]], *, known: Collection[str] = ()) -> dict[str, Any]:
        """Values the user gave, by the foreign attribute name without prefix.

        Args:
            groups: One sequence per leading flag: the flag (with prefix), then its values.
            known: Flags to suggest for an unknown one.

        Raises:
            ConfigError: With all problems found.
        """
        ...


def plain_json(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A copy of ``values`` made of JSON types only (tuples become lists).

    Raises:
        TypeError: A value is not JSON data; the message names its key.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        try:
            result[str(key)] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{what} {key} is not plain JSON data: {value!r}") from error
    return result
