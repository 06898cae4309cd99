"""Engines must have neighbouring GPUs of one node; GPU numbers as a process sees them."""

from __future__ import annotations

import pytest

from slime.cluster.hosted_server import HostFacts
from slime.cluster.placement import Slot, check_engine_slots
from slime.config import ClusterConfig, Config
from slime.config.engine_plan import plan_engines
from slime.errors import ConfigError


def plan_of(trainers: int, rollout: int, per_engine: int, per_node: int = 8):
    cluster = ClusterConfig(
        actor_num_gpus_per_node=trainers,
        rollout_num_gpus=rollout,
        rollout_num_gpus_per_engine=per_engine,
        num_gpus_per_node=per_node,
    )
    return plan_engines(Config(cluster=cluster))


def nodes(*sizes: int) -> list[Slot]:
    return [Slot(bundle=0, node_id=f"node{n}", gpu_id=gpu) for n, size in enumerate(sizes) for gpu in range(size)]


def test_engines_that_fit_their_nodes():
    check_engine_slots(plan_of(4, 4, 4), nodes(8))
    check_engine_slots(plan_of(4, 8, 8, per_node=4), nodes(4, 4, 4))
    check_engine_slots(plan_of(1, 1, 1), [Slot(bundle=b, node_id="a", gpu_id=None) for b in range(2)])


def test_an_engine_over_the_end_of_a_node_is_refused():
    with pytest.raises(ConfigError, match=r"engine 0 needs 4 .* GPU 3 of node node0, GPU 0 of node node1"):
        check_engine_slots(plan_of(2, 4, 4), nodes(4, 2))


def test_gaps_between_the_gpus_of_an_engine_are_refused():
    slots = [Slot(bundle=0, node_id="a", gpu_id=gpu) for gpu in (0, 1, 3)]
    with pytest.raises(ConfigError, match="neighbouring"):
        check_engine_slots(plan_of(1, 2, 2), slots)


def test_a_process_counts_only_the_gpus_that_it_may_see():
    facts = HostFacts(node_id="a", address="h", visible_gpus="4,5,6,7")
    assert facts.local_gpu(6) == 2
    assert HostFacts(node_id="a", address="h").local_gpu(6) == 6
