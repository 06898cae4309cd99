"""Megatron distributed checkpoints of model, optimizer, schedule and random state.

Owns their content and the collective save and load; names and renames are ``checkpoint_dirs``', the files
of a save and when it is complete ``checkpoint_files``'.
A checkpoint can be loaded under another tensor, pipeline or data parallel layout; random state is
restored on the same layout only. Tests hold: training continues bit for bit on the same layout, and
with equal losses on another.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from slime.backends.megatron.checkpoint_dirs import StartPoint
from slime.backends.megatron.checkpoint_extras import load_snapshots, sharded_snapshots
from slime.backends.megatron.checkpoint_files import PendingSave, checkpoint_faults, plan_save
from slime.backends.megatron.export import load_hf
from slime.backends.megatron.optimizer_parts import fit_parts
from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.schedule import continue_optimizer
from slime.backends.megatron.snapshots import WeightSnapshot
from slime.backends.megatron.value_head import leave_missing_head_out
from slime.config import Config
from slime.errors import CheckpointError

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = 3.0
_NO_PARAMETER: Any = "no parameter"


class Trainable:
    """What a checkpoint holds: chunks, and the optimizer and schedule if they are to be kept."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any = None, scheduler: Any = None) -> None:
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.snapshots: dict[str, WeightSnapshot] = {}  # other weights of this model that training changes

    def model_state(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Sharded state of the chunks under Megatron's keys."""
        if len(self.chunks) == 1:
            return {"model": self.chunks[0].sharded_state_dict(metadata=metadata)}
        return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(self.chunks)}

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Put a loaded model state into the chunks."""
        for i, chunk in enumerate(self.chunks):
            chunk.load_state_dict(state["model" if len(self.chunks) == 1 else f"model{i}"], strict=False)

    def storages(self) -> set[int]:
        """Addresses of the memory that training writes to."""
        tensors = [t for chunk in self.chunks for t in chunk.state_dict(keep_vars=True).values()]
        tensors += [t for snapshot in self.snapshots.values() for t in snapshot.tensors]
        for part in self.optimizer_parts if self.optimizer is not None else []:
            if part.optimizer is not None:
                tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
                tensors += [v for state in part.optimizer.state.values() for v in state.values()]
        return {t.untyped_storage().data_ptr() for t in tensors if torch.is_tensor(t)}

    @property
    def optimizer_parts(self) -> list[Any]:
        """The optimizers of a chained one."""
        return list(self.optimizer.chained_optimizers)


def begin_checkpoint(
    trainable: Trainable, config: Config, parallel: ParallelState, root: Path, rollout_id: int
) -> PendingSave:
    """Describe a checkpoint of ``{root}/iter_{rollout_id:07d}`` whose files are still to be written. Collective.

    Args:
        trainable: What to save.
        config: Dumped beside the weights.
        parallel: This rank's place.
        root: ``--save``.
        rollout_id: The rollout whose training it contains.

    Raises:
        CheckpointError: Its directory cannot be made.
    """
    metadata = _content_metadata(parallel)

    def state() -> dict[str, Any]:
        return _full_state(trainable, config, parallel, metadata, rollout_id)

    stored = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    return plan_save(state, stored, config, parallel, root, rollout_id)


def load_weights(trainable: Trainable, config: Config, parallel: ParallelState, point: StartPoint) -> None:
    """Load a start point's weights only. Collective for a Megatron checkpoint.

    An optimizer takes its fp32 master weights over from the model's.

    Raises:
        CheckpointError: The checkpoint does not fit the model.
    """
    if point.kind == "hf":
        load_hf(trainable.chunks, config, point.path)
    else:
        state = trainable.model_state(_content_metadata(parallel))
        if config.role == "critic":
            for chunk_state in state.values():
                leave_missing_head_out(chunk_state, point.path)
        trainable.load_model_state(_load(state, point.path))
    if trainable.optimizer is not None:
        trainable.optimizer.reload_model_params()


def resume(trainable: Trainable, config: Config, parallel: ParallelState, point: StartPoint) -> None:
    """Load everything a checkpoint holds that the flags do not exclude. Collective over all ranks.

    ``--no-load-optim`` leaves optimizer and schedule fresh, ``--no-load-rng`` the random state.

    Raises:
        CheckpointError: The checkpoint does not fit the model or the schedule, or has no optimizer state.
    """
    common = _load_common(point.path)
    with_optimizer = not config.megatron.get("no_load_optim", False)
    if with_optimizer and not common.get("has_optimizer", True):
        raise CheckpointError(f"{point.path} was saved with --no-save-optim; add --no-load-optim to start a fresh one")
    same_layout = common.get("layout") == _layout(parallel)
    with_rng = not config.megatron.get("no_load_rng", False) and common.get("has_rng", False) and same_layout
    if not same_layout:
        logger.info("%s was saved under another parallel layout; the random state starts anew", point.path)
    metadata = _content_metadata(parallel)
    state = trainable.model_state(metadata)
    if with_optimizer:
        _create_optimizer_states(trainable)
        state["optimizer"] = trainable.optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    if with_rng:
        state["rng_state"] = _rng_object(None, parallel)
    loaded = _load(state, point.path)
    trainable.load_model_state(loaded)
    if with_optimizer:
        with torch.no_grad():
            continue_optimizer(
                trainable.optimizer,
                trainable.scheduler,
                fit_parts(trainable.optimizer, loaded["optimizer"]),
                loaded["opt_param_scheduler"],
                warmup_is_share=config.megatron.get("lr_warmup_fraction") is not None,
            )
    else:
        trainable.optimizer.reload_model_params()
    if with_rng:
        _restore_rng(loaded["rng_state"][0])


def resume_snapshots(trainable: Trainable, parallel: ParallelState, point: StartPoint) -> None:
    """Load the snapshots of ``trainable`` that a checkpoint holds. Collective over all ranks.

    Raises:
        CheckpointError: The checkpoint does not fit the model.
    """
    load_snapshots(
        trainable.snapshots,
        trainable.chunks,
        lambda: trainable.model_state(_content_metadata(parallel)),
        load=lambda state: _load(state, point.path),
        put=trainable.load_model_state,
        held=_load_common(point.path).get("snapshots", ()),
    )


def _full_state(
    trainable: Trainable, config: Config, parallel: ParallelState, metadata: dict[str, Any], rollout_id: int
) -> dict[str, Any]:
    with_optimizer = not config.checkpoint.no_save_optim
    with_rng = not config.megatron.get("no_save_rng", False)
    state = trainable.model_state(metadata)
    extras = sharded_snapshots(trainable.snapshots, trainable.chunks, lambda: trainable.model_state(metadata))
    if with_optimizer:
        _create_optimizer_states(trainable)
        state["optimizer"] = trainable.optimizer.sharded_state_dict(state, metadata=metadata)
        state["opt_param_scheduler"] = trainable.scheduler.state_dict()
    if with_rng:
        state["rng_state"] = _rng_object([_rng_state()], parallel)
    state |= extras
    state |= {
        "snapshots": list(extras),
        "iteration": rollout_id,
        "checkpoint_version": CHECKPOINT_VERSION,
        "layout": _layout(parallel),
        "has_optimizer": with_optimizer,
        "has_rng": with_rng,
    }
    return state


def _create_optimizer_states(trainable: Trainable) -> None:
    """Give an optimizer that never stepped the state of one that is about to.

    megatron describes the state by what is there and asserts that something is. Its own way to make it,
    a step with zero gradients, would decay the weights and count as a step.
    """
    for part in trainable.optimizer_parts:
        if part.optimizer is None or part.optimizer.state:
            continue
        rates = [group["lr"] for group in part.optimizer.param_groups]
        for group in part.optimizer.param_groups:
            group["lr"] = 0.0
        part._init_optimizer_states_with_dummy_values()
        for group, rate in zip(part.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in part.optimizer.state.values():
            state["step"].zero_()
    _count_steps_without_parameters([p.optimizer for p in trainable.optimizer_parts if p.optimizer is not None])


def _count_steps_without_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give an optimizer of nothing the step count of the others.

    A pipeline stage without experts has one for experts. megatron asks it for its step count, and may write that
    for the stages that have experts.
    """
    empty = [o for o in optimizers if not any(group["params"] for group in o.param_groups)]
    steps = [state["step"] for o in optimizers if o not in empty for state in o.state.values()]
    for optimizer in empty:
        optimizer.state[_NO_PARAMETER] = {"step": steps[0].clone()}


def _content_metadata(parallel: ParallelState) -> dict[str, Any]:
    """How Megatron is to shard: only this form of the optimizer's state can change its layout."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel.dp_cp_group,
    }


def _layout(parallel: ParallelState) -> dict[str, int]:
    return {
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "vpp": parallel.vpp_size,
        "cp": parallel.cp_size,
        "ep": parallel.ep_size,
        "world": parallel.world_size,
    }


def _load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    # Every rank reads what it needs. FullyParallelLoadStrategyWrapper, which reads once and exchanges, left
    # norms and fc1 of some ranks with their old values over gloo (megatron-core 0.19.2).
    with checkpoint_faults(f"loading {path}"):
        return dist_checkpointing.load(state, str(path), TorchDistLoadShardedStrategy())


def _load_common(path: Path) -> dict[str, Any]:
    with checkpoint_faults(f"loading {path}"):
        return dist_checkpointing.load_common_state_dict(str(path))


def _rng_object(state: list[dict[str, Any]] | None, parallel: ParallelState) -> ShardedObject:
    return ShardedObject(
        "rng_state",
        state,
        (parallel.pp_size, parallel.tp_size),
        (parallel.pp_rank, parallel.tp_rank),
        replica_id=mpu.get_data_parallel_rank(with_context_parallel=True),
    )


def _rng_state() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
