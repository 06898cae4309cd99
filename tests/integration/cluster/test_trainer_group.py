import dataclasses
import os
from pathlib import Path

import pytest
import ray

from slime.cluster import waits
from slime.cluster.guardian import marked_processes
from slime.cluster.placement import Placement
from slime.cluster.ray_session import guarded_processes, ray_session
from slime.cluster.trainer import TrainerGroup
from slime.config import ClusterConfig, Config, DebugConfig, TrainConfig
from slime.errors import ConfigError, TrainerError, WaitTimeoutError

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

CLUSTER = ClusterConfig(device="cpu", actor_num_gpus_per_node=2, rollout_num_gpus=0, train_step_timeout_seconds=3.0)
CONFIG = Config(
    cluster=CLUSTER, train=TrainConfig(train_env_vars={"FROM_FLAG": "yes"}), debug=DebugConfig(debug_train_only=True)
)


@pytest.fixture(scope="module")
def session():
    with guarded_processes() as guardian, ray_session("cpu", 2, guardian.scratch_dir):
        yield guardian
    assert not marked_processes(guardian.mark)
    assert not guardian.scratch_dir.exists()


@pytest.fixture
def group(session, tmp_path):
    placement = Placement(CONFIG.layout, device="cpu", timeout_seconds=30)
    group = TrainerGroup(CONFIG, placement, tmp_path, worker_path="tests.integration.cluster.standins:StandInWorker")
    try:
        assert group.init() == 3
        yield group
    finally:
        group.close(0.3)
        group.close(0.3)
        placement.close()


def test_life_of_a_group(group):
    assert group.train(ray.put({}), 4) == {"train/loss": 0.5}
    assert group.update_weights() == {"perf/update_weights_wire_bytes": 1.0}
    assert group.weight_version() == 1
    for threads, omp, from_flag, work_dir in group._call_all("threads", limit=10):
        assert threads == int(omp) >= 1
        assert from_flag == "yes"
        assert Path(work_dir) == Path.cwd()


def test_an_exception_in_one_rank_names_the_rank_and_ends_the_wait(group):
    with pytest.raises(
        TrainerError, match="trainer rank 1 to train rollout 4 failed: ValueError: loss is not finite"
    ) as info:
        group.train(ray.put({0: "hang", 1: "raise"}), 4)
    assert "RayTaskError" not in str(info.value)


def test_a_dead_rank_is_named_with_the_end_of_its_log(group):
    with pytest.raises(TrainerError, match=r"(?s)trainer rank 1 of 2 died.*about to run out of memory"):
        group.train(ray.put({0: "hang", 1: "die"}), 4)


def test_a_hung_rank_is_a_bounded_wait_with_its_stack_in_its_log(group, tmp_path):
    with pytest.raises(WaitTimeoutError, match="trainer rank 0 to train rollout 4") as info:
        group.train(ray.put({0: "hang"}), 4)
    assert "rank 1" not in str(info.value)
    assert "standins.py" in (tmp_path / "trainer_0.log").read_text()


def test_a_rank_that_died_is_named_and_not_the_one_that_noticed(group):
    with pytest.raises(TrainerError, match=r"(?s)^trainer rank 1 of 2 died.*about to run out of memory"):
        group.train(ray.put({0: "raise", 1: "die"}), 4)


def test_a_frozen_rank_is_named_whoever_reports_first(group):
    with pytest.raises(
        TrainerError, match=r"(?s)rank 0 .* failed: RuntimeError: Conn.*trainer rank 1 is stopped; kill -CONT \d+"
    ):
        group.train(ray.put({0: "lose a peer", 1: "freeze"}), 4)
    with pytest.raises(WaitTimeoutError, match=r"(?s)trainer rank 1 to train.*trainer rank 1 is stopped"):
        group.train(ray.put({}), 5)


def test_a_cluster_that_is_too_small_is_refused_with_both_numbers(session):
    large = dataclasses.replace(CLUSTER, actor_num_gpus_per_node=5)
    layout = dataclasses.replace(CONFIG, cluster=large).layout
    with pytest.raises(ConfigError, match=r"needs 5 CPU slots .* has 2"):
        Placement(layout, device="cpu", timeout_seconds=5)


def test_processes_are_marked(session, group):
    assert os.getpid() not in marked_processes(session.mark)
    assert len(marked_processes(session.mark)) >= 3


def test_stacks_are_asked_of_processes_of_this_node_only(session, group, tmp_path):
    # A process id of another node may be anybody here; SIGUSR1 would end this test.
    assert waits.request_stacks([waits.Process(node_id="elsewhere", pid=os.getpid())]) == []
    group._processes[0] = dataclasses.replace(group._processes[0], node_id="elsewhere")
    with pytest.raises(WaitTimeoutError, match=r"rank 0 is process \d+ of node elsewhere"):
        group.train(ray.put({0: "hang"}), 4)
    assert "standins.py" not in (tmp_path / "trainer_0.log").read_text()
