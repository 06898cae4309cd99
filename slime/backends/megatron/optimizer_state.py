"""The optimizer's state as a checkpoint keeps it, without a second copy of it in memory.

``DistributedOptimizer`` cuts a flat buffer of all parameters into one shard per data-parallel rank; a
checkpoint that any layout can load holds whole parameters. Megatron (0.19.x) makes them by gathering all
shards on every rank: with Adam up to eight fp32 copies of the parameters at the peak, four of them even
on a single rank. Here every parameter is put together on one rank only, the one that holds most of it.
Nearly all lie in one shard and are described where they are; only those cut by a shard's end are sent.
Owns saving only. Tests hold: such a checkpoint loads as Megatron's own does, under any layout; a single
rank's checkpoint refers to the optimizer's own tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch import distributed as dist

_PREFIX = "optimizer.state"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements ``[start, end)`` of a flattened parameter, in the shard of data-parallel rank ``rank``."""

    rank: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def whole_parameter_state(optimizer: Any, model_state: Any) -> dict[int, dict[str, Any]]:
    """Sharded state of whole parameters, each on one rank of its data-parallel group. Collective over that.

    Args:
        optimizer: A ``DistributedOptimizer``.
        model_state: The model's sharded state, whose description of a parameter fits its state too.

    Returns:
        Number of a parameter -> name of its state -> sharded tensor, as
        ``sharded_param_state_fully_reshardable`` does; empty for a parameter that another rank describes.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    described = {entry.data: entry for entry in nested_values(sharded)}
    group = optimizer.data_parallel_group
    state: dict[int, dict[str, Any]] = {}
    for index, (parameter, pieces) in enumerate(_parameters(optimizer, group.size())):
        owner = max(pieces, key=lambda piece: piece.size).rank
        tensors = _assemble(optimizer, parameter, pieces, owner, group)
        state[index] = {
            name: _describe(described[parameter], name, tensor.view(parameter.shape), optimizer)
            for name, tensor in tensors.items()
        }
    return state


def _parameters(optimizer: Any, num_shards: int) -> Iterator[tuple[Any, list[_Piece]]]:
    """Every parameter, in Megatron's order, with the pieces it is cut into."""
    for buffer in optimizer.buffers:
        for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            size = bucket.grad_data.numel() // num_shards
            pieces = []
            for rank in range((start - bucket.offset) // size, (end - 1 - bucket.offset) // size + 1):
                shard = bucket.offset + rank * size
                pieces.append(_Piece(rank, max(start, shard) - start, min(end, shard + size) - start))
            yield parameter, pieces


def _assemble(
    optimizer: Any, parameter: Any, pieces: list[_Piece], owner: int, group: dist.ProcessGroup
) -> Mapping[str, Tensor]:
    """The flat fp32 state on the owner: the optimizer's own tensors where they are whole. Empty elsewhere."""
    rank = group.rank()
    if rank not in {piece.rank for piece in pieces}:
        return {}
    names = ("param", *optimizer.optimizer_state_keys)
    own = optimizer._get_main_param_and_optimizer_states(parameter)
    mine = {name: own[name].detach().float().flatten() for name in names}
    if len(pieces) == 1:
        return mine
    if rank != owner:
        for tensor in mine.values():
            dist.send(tensor.contiguous(), dst=dist.get_global_rank(group, owner), group=group)
        return {}
    whole: dict[str, Tensor] = {}
    for name, tensor in mine.items():
        whole[name] = tensor.new_empty(parameter.numel())
    for piece in pieces:
        for name in names:
            part = whole[name][piece.start : piece.end]
            if piece.rank == owner:
                part.copy_(mine[name])
            else:
                dist.recv(part, src=dist.get_global_rank(group, piece.rank), group=group)
    return whole


def _describe(model_entry: Any, name: str, tensor: Tensor, optimizer: Any) -> Any:
    """The model's description of a parameter, for one part of its state, on the only rank that has it."""
    *others, _ = model_entry.replica_id
    changed: dict[str, Any] = {
        "key": f"{_PREFIX}.{name}.{model_entry.key}",
        "data": tensor,
        "replica_id": (*others, optimizer.distributed_optimizer_instance_id),
    }
    if not isinstance(model_entry, ShardedTensorFactory):
        changed["dtype"] = torch.float32
    entry = replace(model_entry, **changed)
    entry.validate_metadata_integrity()
    return entry
