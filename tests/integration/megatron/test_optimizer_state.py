"""The optimizer's state for a checkpoint: Megatron's own numbers, without copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gloo import Rank, run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker

from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import apply_factories  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip
from slime.backends.megatron.optimizer_state import whole_parameter_state  # isort: skip

ORIGINAL = DistributedOptimizer.sharded_param_state_fully_reshardable
"""Taken before ``optimizer_fixes.apply`` replaces it."""

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def described(rank: Rank, model_dir: Path, argv: tuple[str, ...]) -> dict[str, Any]:
    """Both descriptions of the state after a step: key and offset -> data, without those that are copies of others'."""
    argv = ("--lr", "1e-2", "--lr-decay-style", "constant", *argv)
    config = make_config(model_dir, argv, num_processes=rank.world_size, data={"global_batch_size": 12})
    with running_worker(config, rank) as worker:
        worker.train(make_rollout())
        (part,) = worker._trainable.optimizer_parts
        model_state = worker._trainable.model_state(METADATA)
        theirs = ORIGINAL(part, model_state, False, METADATA)
        ours = whole_parameter_state(part, model_state)
        live = worker._trainable.storages()
        flat = _flat(ours)
        return {
            "parameters": (len(theirs), len(ours)),
            "theirs": _flat(theirs),
            "ours": flat,
            "copied": [key for key, t in flat.items() if t.untyped_storage().data_ptr() not in live],
        }


def _flat(state: Any) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    apply_factories(state)
    return {(entry.key, entry.global_offset): entry.data for entry in nested_values(state)}


def test_one_process_describes_the_optimizers_own_tensors(model_dir: Path) -> None:
    found = run_ranks(1, described, model_dir, ())[0]
    assert found["ours"].keys() == found["theirs"].keys()
    assert all(found["ours"][key].equal(tensor) for key, tensor in found["theirs"].items())
    assert found["copied"] == []


def test_two_processes_hold_each_parameter_once(model_dir: Path) -> None:
    ranks = run_ranks(2, described, model_dir, ())
    for found in ranks:
        assert found["parameters"][0] == found["parameters"][1]
    first, second = (found["ours"] for found in ranks)
    assert first
    assert second
    assert not first.keys() & second.keys()
    together = first | second
    theirs = ranks[0]["theirs"]  # the main replica
    assert together.keys() == theirs.keys()
    assert all(together[key].equal(tensor) for key, tensor in theirs.items())
    # Only the parameter that the boundary between the two shards cuts is put together from parts.
    copied = {(key.split(".", 3)[3], offset[0]) for found in ranks for key, offset in found["copied"]}
    assert len(copied) <= 1
