"""This rank's parameters with their places in the weight table of the model's family.

Owns the names: a chunk counts its layers and experts from 0, the table globally. Tests hold through
``export``: every tensor of a checkpoint has exactly one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import distributed as dist

from slime.config import Config
from slime.errors import ConfigError
from slime.weights.families import FAMILIES, Family
from slime.weights.families.family import Place, global_name, local_layer, with_value_head
from slime.weights.ops import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One parameter or persistent buffer of this rank."""

    place: Place
    data: torch.Tensor


def model_family(config: Config) -> Family:
    """The weight table of the configured checkpoint's family.

    Raises:
        ConfigError: There is no checkpoint, or no table for it.
    """
    if config.hf is None:
        raise ConfigError("training needs --hf-checkpoint: a model directory with config.json and tokenizer")
    if config.hf.model_type not in FAMILIES:
        raise ConfigError(
            f"--hf-checkpoint {config.hf.path}: model_type {config.hf.model_type!r} cannot be trained yet; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[config.hf.model_type]
    return with_value_head(family) if config.role == "critic" else family


def model_shape(config: Config) -> ModelShape:
    """The sizes that weight conversions depend on."""
    megatron = config.megatron
    return ModelShape(
        num_attention_heads=megatron.num_attention_heads,
        num_query_groups=megatron.num_query_groups,
        head_dim=megatron.kv_channels,
        vocab_size=megatron.vocab_size,
        padded_vocab_size=megatron.padded_vocab_size,
    )


def local_tensors(chunks: Sequence[MegatronModule], family: Family) -> list[LocalTensor]:
    """Parameters and persistent buffers of this rank's chunks, in the order of the model."""
    found: list[LocalTensor] = []
    for chunk in unwrap_model(list(chunks)):
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):  # extra state of a module
                continue
            index = local_layer(name)
            layer = None if index is None else chunk.decoder.layers[index]
            number = None if layer is None else layer.layer_number - 1
            first_expert = layer.mlp.local_expert_indices[0] if layer is not None and layer.is_moe_layer else 0
            place = family.place(global_name(name, number, first_expert))
            found.append(LocalTensor(place=place, data=tensor.detach()))
    return found


def shard_group(place: Place) -> dist.ProcessGroup:
    """The ranks that divide a tensor among them."""
    if place.expert is None:
        return mpu.get_tensor_model_parallel_group()
    return mpu.get_expert_tensor_parallel_group()
