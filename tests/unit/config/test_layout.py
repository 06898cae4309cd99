import pytest

from slime.config import ClusterConfig
from slime.config.layout import plan_layout


def layout(*, train_only=False, rollout_only=False, external=False, **counts):
    return plan_layout(
        ClusterConfig(device="cpu", **counts),
        debug_train_only=train_only,
        debug_rollout_only=rollout_only,
        external_engines=external,
    )


def test_split_puts_rollout_after_the_trainer():
    got = layout(actor_num_nodes=1, actor_num_gpus_per_node=2, rollout_num_gpus=3)
    assert (got.num_slots, got.trainer, got.rollout) == (5, (0, 1), (2, 3, 4))


@pytest.mark.parametrize(("actor", "rollout", "total"), [(4, 4, 4), (2, 4, 4), (4, 2, 4)])
def test_colocated_shares_slots_from_zero(actor, rollout, total):
    got = layout(actor_num_gpus_per_node=actor, rollout_num_gpus=rollout, colocate=True)
    assert got.num_slots == total
    assert got.trainer == tuple(range(actor))
    assert got.rollout == tuple(range(rollout))


def test_debug_modes_reserve_one_side():
    counts = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 3}
    assert layout(train_only=True, **counts).rollout == ()
    assert layout(train_only=True, **counts).num_slots == 4
    only = layout(rollout_only=True, **counts)
    assert (only.num_slots, only.trainer, only.rollout) == (3, (), (0, 1, 2))


def test_external_engines_need_no_slots():
    got = layout(actor_num_gpus_per_node=2, rollout_num_gpus=4, external=True)
    assert (got.num_slots, got.rollout) == (2, ())
