"""Which engines exist on which slots, in every mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slime.config import ClusterConfig, Config, DebugConfig, RolloutConfig
from slime.config.deployment import ModelDeployment, ServerGroup
from slime.config.engine_plan import plan_engines


def config_of(*models: ModelDeployment, **cluster: Any) -> Config:
    total = sum(model.num_gpus for model in models) or cluster.pop("rollout_num_gpus", 4)
    return Config(
        cluster=ClusterConfig(rollout_num_gpus=total, **cluster),
        rollout=RolloutConfig(hf_checkpoint="/models/a", rollout_seed=100),
        deployment=models,
    )


def test_split_engines_follow_the_trainer() -> None:
    plan = plan_engines(config_of(actor_num_gpus_per_node=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=2))
    assert [(e.name, e.slots, e.trainer_ranks, e.seed) for e in plan.engines] == [
        ("engine 0", (4, 5), (), 100),
        ("engine 1", (6, 7), (), 102),
    ]
    assert [e.model_path for e in plan.engines] == ["/models/a"] * 2
    assert not any(e.offloaded for e in plan.engines)


def test_colocated_engines_know_the_ranks_on_their_slots() -> None:
    config = config_of(
        actor_num_gpus_per_node=3,
        rollout_num_gpus=4,
        rollout_num_gpus_per_engine=2,
        colocate=True,
        offload_rollout=True,
    )
    plan = plan_engines(config)
    assert [e.trainer_ranks for e in plan.engines] == [(0, 1), (2,)]
    assert [e.offloaded for e in plan.engines] == [True, True]
    kept = plan_engines(replace(config, cluster=replace(config.cluster, offload_rollout=False)))
    assert [e.offloaded for e in kept.engines] == [False, False]


def test_only_engines_beside_the_trainer_are_offloaded() -> None:
    config = config_of(actor_num_gpus_per_node=1, rollout_num_gpus=3, colocate=True, offload_rollout=True)
    assert [e.offloaded for e in plan_engines(config).engines] == [True, False, False]
    alone = replace(config, debug=DebugConfig(debug_rollout_only=True))
    assert [e.offloaded for e in plan_engines(alone).engines] == [False, False, False]


def test_an_engine_over_two_nodes_has_a_process_on_each() -> None:
    config = config_of(
        actor_num_gpus_per_node=4, rollout_num_gpus=16, rollout_num_gpus_per_engine=8, num_gpus_per_node=4
    )
    first, second = plan_engines(config).engines
    assert [(p.node_rank, p.slots) for p in first.processes] == [(0, (4, 5, 6, 7)), (1, (8, 9, 10, 11))]
    assert second.num_gpus == 8
    assert second.processes[0].slots[0] == 12


def test_placeholders_keep_their_slots_and_each_model_has_a_router() -> None:
    frozen = ModelDeployment(name="judge", model_path="/models/j", server_groups=(ServerGroup(num_gpus=2),))
    actor = ModelDeployment(
        name="actor",
        server_groups=(ServerGroup(worker_type="placeholder", num_gpus=1), ServerGroup(num_gpus=2)),
    )
    plan = plan_engines(config_of(frozen, actor, actor_num_gpus_per_node=1))
    assert [(e.model, e.slots, e.updatable) for e in plan.engines] == [
        ("judge", (1,), False),
        ("judge", (2,), False),
        ("actor", (4,), True),
        ("actor", (5,), True),
    ]
    assert plan.reserved == (3,)
    assert [(r.model, r.default) for r in plan.routers] == [("judge", False), ("actor", True)]


def test_encoders_take_no_weights() -> None:
    groups = tuple(ServerGroup(worker_type=kind, num_gpus=1) for kind in ("encoder", "prefill", "decode"))
    plan = plan_engines(config_of(ModelDeployment(name="a", server_groups=groups)))
    assert [e.updatable for e in plan.engines] == [False, True, True]
    assert plan.default_router.disaggregated


@given(
    groups=st.lists(
        st.tuples(st.sampled_from(["regular", "placeholder"]), st.integers(1, 3), st.sampled_from([1, 2, 4, 8, 16])),
        min_size=1,
        max_size=6,
    ),
    trainers=st.integers(0, 9),
    colocate=st.booleans(),
)
def test_every_slot_is_given_out_once(groups: list[tuple[str, int, int]], trainers: int, colocate: bool) -> None:
    models = [
        ModelDeployment(
            name=str(i), server_groups=(ServerGroup(worker_type=kind, num_gpus=n * size, num_gpus_per_engine=size),)
        )
        for i, (kind, n, size) in enumerate(groups)
    ]
    config = config_of(*models, actor_num_gpus_per_node=trainers, colocate=colocate)
    plan = plan_engines(config)
    given_out = [slot for engine in plan.engines for slot in engine.slots] + list(plan.reserved)
    assert sorted(given_out) == list(config.layout.rollout)
    assert [e.index for e in plan.engines] == list(range(len(plan.engines)))
    assert all(len(p.slots) <= config.cluster.num_gpus_per_node for e in plan.engines for p in e.processes)
