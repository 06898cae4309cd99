"""Weights beside the model's that training changes too: in the checkpoint, sharded, under any layout.

A reference that ``--ref-update-interval`` moves and the policies of ``--keep-old-actor`` are part of a run's state: a
resumed run that started them anew would train on other numbers. Owns their sharded state, which is that of the model
under a prefix. Tests hold: an interrupted run has the losses of an uninterrupted one, also on another layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from slime.backends.megatron.snapshots import WeightSnapshot

logger = logging.getLogger(__name__)

ModelState = Callable[[], dict[str, Any]]
"""Sharded state of what the model's chunks hold at the moment."""

ModelLoad = Callable[[dict[str, Any]], dict[str, Any]]
"""Reads a sharded state from a checkpoint."""

_FLAGS = {
    "reference": "--ref-update-interval",
    "old_actor": "--keep-old-actor",
    "rollout_actor": "--keep-old-actor",
}


def sharded_snapshots(
    snapshots: dict[str, WeightSnapshot], chunks: Sequence[Any], model_state: ModelState
) -> dict[str, Any]:
    """State of all snapshots for saving, each under its name.

    Args:
        snapshots: By name.
        chunks: The model, which lends its sharding.
        model_state: Describes the chunks.
    """
    states: dict[str, Any] = {}
    for name, snapshot in snapshots.items():
        with snapshot.lent_to(chunks):
            states[name] = _described(name, model_state())
    return states


def load_snapshots(
    snapshots: dict[str, WeightSnapshot],
    chunks: Sequence[Any],
    model_state: ModelState,
    *,
    load: ModelLoad,
    put: Callable[[dict[str, Any]], None],
    held: Sequence[str],
) -> None:
    """Fill the snapshots that a checkpoint holds; the others stay as they are, with a warning. Collective.

    Args:
        snapshots: By name.
        chunks: The model, which lends its sharding and gets its own weights back.
        model_state: Describes the chunks.
        load: Reads a described state.
        put: Puts a model state that was read into the chunks.
        held: Names in the checkpoint.

    Raises:
        CheckpointError: The checkpoint does not fit the model.
    """
    for name, snapshot in snapshots.items():
        if name not in held:
            logger.warning(
                "the checkpoint was saved without the %s of %s; it starts anew from what the flags name",
                name.replace("_", " "),
                _FLAGS[name],
            )
            continue
        with snapshot.lent_to(chunks):
            loaded = load({name: _described(name, model_state())})
            put(loaded[name])
            snapshot.update(chunks)


def _described(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """A model state under another prefix that keeps its values when the model gets its own weights back."""

    def keep(entry: Any) -> Any:
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and isinstance(entry.data, torch.Tensor):
            # On a CPU this is the snapshot's own memory; on a device a copy of what is only lent to it.
            entry.data = entry.data.detach().cpu()
        return entry

    add_prefix_for_sharding(state, f"{name}.")
    dict_list_map_inplace(keep, state)
    return state
