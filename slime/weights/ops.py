"""Invertible conversions between tensors named as in Hugging Face checkpoints and as in Megatron.

Owns the operations, each with both directions and its tensor-parallel sharding, and ``Rule``, which binds
one to names. Which rules a model family has is ``families``'s. Torch only. Tests hold: every operation
undoes its inverse bit for bit, sharding and gathering included, for any shape and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that conversions depend on."""

    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int


class Op(Protocol):
    """One conversion: some Hugging Face tensors to one Megatron tensor, and its split over ranks."""

    def to_megatron(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """The whole Megatron tensor."""
        ...

    def to_hf(self, tensor: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        """Inverse of ``to_megatron``; parts may be views."""
        ...

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """The part of a whole Megatron tensor that one of ``size`` tensor-parallel ranks holds."""
        ...

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """Inverse of ``shard``: the whole tensor from all ranks' parts."""
        ...


@dataclass(frozen=True, slots=True)
class Rename(Op):
    """The same tensor on both sides.

    Args:
        split: Dimension along which tensor-parallel ranks divide it: 0 for column-parallel layers, 1 for
            row-parallel ones, None when every rank holds it whole.
    """

    split: int | None = None

    @override
    def to_megatron(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        (tensor,) = tensors
        return tensor

    @override
    def to_hf(self, tensor: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (tensor,)

    @override
    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return tensor if self.split is None else _even_chunks(tensor, size, self.split)[rank]

    @override
    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if self.split is None or len(shards) == 1 else torch.cat(list(shards), self.split)


@dataclass(frozen=True, slots=True)
class SplitQKV(Op):
    """Query, key and value projections, weights or biases, in one tensor ordered by query group.

    Per group: the rows of its query heads, of its key head, of its value head. Ranks divide the groups.
    """

    @override
    def to_megatron(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        grouped = [t.reshape(shape.num_query_groups, -1, *t.shape[1:]) for t in tensors]
        return torch.cat(grouped, 1).reshape(-1, *tensors[0].shape[1:])

    @override
    def to_hf(self, tensor: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        heads = shape.num_attention_heads // shape.num_query_groups
        grouped = tensor.reshape(shape.num_query_groups, -1, *tensor.shape[1:])
        parts = torch.split(grouped, [heads * shape.head_dim, shape.head_dim, shape.head_dim], 1)
        return tuple(part.reshape(-1, *tensor.shape[1:]) for part in parts)

    @override
    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return _even_chunks(tensor, size, 0)[rank]

    @override
    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if len(shards) == 1 else torch.cat(list(shards))


@dataclass(frozen=True, slots=True)
class SplitGateUp(Op):
    """Gate and up projections one below the other. Ranks divide each of the two."""

    @override
    def to_megatron(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return torch.cat(list(tensors))

    @override
    def to_hf(self, tensor: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return tuple(tensor.chunk(2))

    @override
    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return torch.cat([_even_chunks(half, size, 0)[rank] for half in tensor.chunk(2)])

    @override
    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[side] for side in (0, 1) for half in halves])


@dataclass(frozen=True, slots=True)
class PadVocab(Op):
    """Embedding or output layer, padded with zero rows to a size that ranks can divide."""

    @override
    def to_megatron(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        (tensor,) = tensors
        missing = shape.padded_vocab_size - tensor.size(0)
        if missing < 0:
            raise ValueError(
                f"the checkpoint has {tensor.size(0)} embedding rows, more than the padded vocabulary "
                f"of {shape.padded_vocab_size}"
            )
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor

    @override
    def to_hf(self, tensor: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (tensor[: shape.vocab_size],)

    @override
    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return _even_chunks(tensor, size, 0)[rank]

    @override
    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if len(shards) == 1 else torch.cat(list(shards))


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a family's table.

    Args:
        megatron: Megatron's name of the tensor; ``{layer}`` stands for the global layer number, ``{expert}``
            for the global number of an expert.
        hf: The Hugging Face names of its parts.
        op: The conversion.
    """

    megatron: str
    hf: tuple[str, ...]
    op: Op

    def hf_names(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        """The parts' names in one layer, for one of its experts."""
        return tuple(name.format(layer=layer, expert=expert) for name in self.hf)


def _even_chunks(tensor: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    if tensor.size(dim) % size:
        raise ValueError(f"{tensor.size(dim)} rows cannot be divided over {size} tensor-parallel ranks")
    return tensor.chunk(size, dim)
