"""Whole tensors of the model on one rank, or on every rank, collected from the shards of all.

Owns the journey of each tensor to those who receive it: from its pipeline stage to the first or to all, an expert from
the rank that holds it to the first of its expert-parallel group or to all, then from the (expert-)tensor-parallel
shards to the whole. One tensor at a time, so that memory stays bounded. What happens to them is
``export``'s. Tests hold through ``export``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from torch import distributed as dist

from slime.backends.megatron.parameters import local_tensors, model_family, model_shape, shard_group
from slime.config import Config
from slime.weights.families import Family
from slime.weights.families.family import OUTPUT_LAYER, Place
from slime.weights.ops import Op
from slime.weights.report import Receivers


@dataclass(frozen=True, slots=True)
class _Part:
    """What other ranks must know of a rank's part of a tensor."""

    name: str  # Megatron's, global
    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def gather_tensors(
    chunks: Sequence[MegatronModule], config: Config, receivers: Receivers = "first"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model under its Hugging Face name, in the order of stages and layers.

    Collective over the tensor-, expert- and pipeline-parallel ranks of every replica of the model. Real
    tensors on global rank 0 (and some others) or on all ranks, meta tensors of the same shapes elsewhere.
    """
    to_all = receivers == "all"
    bring = _to_all if to_all else _to_first
    family, shape = model_family(config), model_shape(config)
    tied = not config.megatron.untie_embeddings_and_output_weights
    local = {t.place.name: t.data for t in local_tensors(chunks, family) if not (tied and t.place.name == OUTPUT_LAYER)}
    stages, experts = mpu.get_pipeline_model_parallel_group(), mpu.get_expert_model_parallel_group()
    parts: list[list[_Part]] = [[] for _ in range(stages.size())]
    dist.all_gather_object(parts, [_Part(name, t.shape, t.dtype) for name, t in local.items()], group=stages)
    for stage, stage_parts in enumerate(parts):
        for place, owner, part in _of_all_expert_ranks(stage_parts, family, experts):
            data = None
            if owner is None or owner == experts.rank():
                data = bring(local.get(place.name), part, stage, stages)
            if owner is not None and (to_all or stages.rank() == 0):
                data = bring(data, part, owner, experts)
            op, group = place.rule.op, shard_group(place)
            if to_all or (stages.rank() == 0 and (owner is None or experts.rank() == 0)):
                assert data is not None, "a receiver has every tensor by now"
                whole = _whole(op, data, group)
            else:
                whole = op.gather([part.empty("meta")] * group.size())
            yield from zip(place.hf_names, op.to_hf(whole, shape), strict=True)


def _of_all_expert_ranks(
    parts: Sequence[_Part], family: Family, group: dist.ProcessGroup
) -> Iterator[tuple[Place, int | None, _Part]]:
    """A stage's tensors with the experts of the other expert-parallel ranks among them, in order.

    Yields:
        Place, the expert-parallel rank that holds the tensor (None: each does), and the part, which
        is the same for all experts.
    """
    placed = [(family.place(part.name), part) for part in parts]
    for expert_layer, run in groupby(placed, lambda item: None if item[0].expert is None else item[0].layer):
        tensors = list(run)
        if expert_layer is None:
            yield from ((place, None, part) for place, part in tensors)
            continue
        numbers = [place.expert for place, _ in tensors if place.expert is not None]
        first, count = numbers[0], len(set(numbers))
        for owner in range(group.size()):
            for number, (place, part) in zip(numbers, tensors, strict=True):
                yield replace(place, expert=number - first + owner * count), owner, part


def _to_first(data: torch.Tensor | None, part: _Part, owner: int, group: dist.ProcessGroup) -> torch.Tensor | None:
    """A tensor that one rank of a group holds, brought to the group's first; others keep what they had."""
    if owner == 0 or group.rank() not in (0, owner):
        return data
    ranks = dist.get_process_group_ranks(group)
    if group.rank() == owner:
        assert data is not None, f"{part.name} is on its owner"
        dist.send(data.contiguous(), dst=ranks[0], group=group)
        return data
    received = part.empty(torch.cuda.current_device())
    dist.recv(received, src=ranks[owner], group=group)
    return received


def _to_all(data: torch.Tensor | None, part: _Part, owner: int, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor that one rank of a group holds, brought to all of it."""
    if group.size() == 1:
        assert data is not None, f"{part.name} is on its owner"
        return data
    received = part.empty(torch.cuda.current_device()) if data is None or group.rank() != owner else data.contiguous()
    dist.broadcast(received, src=dist.get_process_group_ranks(group)[owner], group=group)
    return received


def _whole(op: Op, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    size = group.size()
    if size == 1 or op.gather([part.new_empty(part.shape, device="meta")] * 2).shape == part.shape:
        return part  # whole on every rank
    shards = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(shards, part.contiguous(), group=group)
    return op.gather(shards)
