"""What actor and critic are asked for, in which order, also when an interrupt comes in between."""

from pathlib import Path

import pytest

from slime.cluster.actor_critic import ActorCritic
from slime.config import (
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    MegatronConfig,
    TrainConfig,
)
from slime.config.roles import RoleConfig
from slime.errors import TrainerError


class Interrupts:
    """Raises ``KeyboardInterrupt`` at the n-th place where the driver waits."""

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def wait(self):
        self.count += 1
        if self.count - 1 == self.at:
            raise KeyboardInterrupt


class Group:
    """A role of two ranks, which notes what it does and is told what to answer."""

    def __init__(self, role, log, interrupts):
        self.role, self.log, self.interrupts = role, log, interrupts
        self.awake = True
        self.first = 0

    def begin_init(self, config):
        self.log.append(f"{self.role} init as {config.role}")
        return []

    def finish_init(self, refs):
        return self.first

    def share(self, value):
        return ("shared", value)

    def begin(self, method, *args):
        assert self.awake
        self.log.append((self.role, method, *args))
        if method == "score":
            return [{0: "v0"}, {1: "v1"}]
        return [{f"{self.role}-{method}": 1.0}, {}]

    def finish(self, refs, doing, timeout_seconds=None):
        assert self.awake
        self.interrupts.wait()
        assert timeout_seconds is None or timeout_seconds >= 0
        return refs

    def read(self, attribute, timeout_seconds=None):
        assert attribute == "returns"
        self.interrupts.wait()
        return [{1: "r1"}, {0: "r0"}]

    def sleep(self):
        self.awake = False
        self.log.append(f"{self.role} sleeps")

    def wake_up(self, timeout_seconds=None):
        self.awake = True
        self.log.append(f"{self.role} wakes")

    def wait_idle(self, timeout_seconds):
        pass


VALUES, RETURNS = ("shared", {0: "v0", 1: "v1"}), ("shared", {0: "r0", 1: "r1"})
ROLLOUT = [
    ("critic", "score", "batch"),
    ("actor", "train", "batch", VALUES),
    ("critic", "train", "batch", VALUES, RETURNS),
]


def make(tmp_path, *, interrupt=None, offload=False, keep=None, critic_only=0):
    save = CheckpointConfig(save=str(tmp_path / "ckpt"), keep_checkpoints=keep)
    critic = RoleConfig(
        train=TrainConfig(),
        data=DataConfig(),
        algorithm=AlgorithmConfig(),
        checkpoint=CheckpointConfig(save=str(tmp_path / "ckpt" / "critic")),
        megatron=MegatronConfig(),
    )
    config = Config(
        cluster=ClusterConfig(offload_train=offload),
        algorithm=AlgorithmConfig(num_critic_only_steps=critic_only),
        checkpoint=save,
        critic=critic,
    )
    log, interrupts = [], Interrupts(interrupt)
    groups = [Group(role, log, interrupts) for role in ("actor", "critic")]
    return ActorCritic(config, *groups), log, groups


def test_a_rollout_goes_from_values_to_returns_to_the_value_loss(tmp_path):
    both, log, _ = make(tmp_path)
    assert both.train("batch", 0) == {"actor-train": 1.0, "critic-train": 1.0}
    assert log == ROLLOUT


def test_the_first_rollouts_leave_the_actor_as_it_is(tmp_path):
    both, log, _ = make(tmp_path, critic_only=2)
    for rollout_id in range(3):
        both.train("batch", rollout_id)
    assert [call[1] for call in log if call[0] == "actor"] == ["estimate", "estimate", "train"]
    assert [call[1] for call in log if call[0] == "critic"] == ["score", "train"] * 3


@pytest.mark.parametrize("interrupt", range(4))
@pytest.mark.parametrize("offload", [False, True])
def test_an_interrupted_rollout_is_finished_and_nothing_trained_twice(tmp_path, interrupt, offload):
    both, log, _ = make(tmp_path, interrupt=interrupt, offload=offload)
    with pytest.raises(KeyboardInterrupt):
        both.train("batch", 0)
    both.wait_idle(10.0)
    both.wait_idle(10.0)
    assert [call for call in log if isinstance(call, tuple)] == ROLLOUT


@pytest.mark.parametrize("interrupt", range(2))
def test_an_interrupted_save_becomes_a_pair(tmp_path, interrupt):
    both, log, _ = make(tmp_path, interrupt=interrupt)
    with pytest.raises(KeyboardInterrupt):
        both.save(3)
    both.wait_idle(10.0)
    assert log == [("critic", "save", 3), ("actor", "save", 3)]


def test_roles_take_turns_on_their_devices(tmp_path):
    both, log, groups = make(tmp_path, offload=True)
    both.init(both._config)
    assert log == ["actor init as actor", "critic init as critic", "critic sleeps"]
    del log[:]
    both.train("batch", 0)
    actor, critic = groups
    assert (actor.awake, critic.awake) == (True, False)
    assert [entry if isinstance(entry, str) else entry[:2] for entry in log] == [
        *("actor sleeps", "critic wakes", ("critic", "score"), "critic sleeps", "actor wakes"),
        ("actor", "train"),
        *("actor sleeps", "critic wakes", ("critic", "train"), "critic sleeps", "actor wakes"),
    ]
    both.sleep()
    assert not actor.awake
    both.save(0, 5.0)  # wakes each of them itself
    assert (actor.awake, critic.awake) == (True, False)


def test_roles_that_continue_different_rollouts_are_refused(tmp_path):
    both, _, groups = make(tmp_path)
    groups[0].first = 2
    with pytest.raises(TrainerError, match="2 for the actor, 0 for the critic"):
        both.init(both._config)


def test_step_metrics_are_those_of_both_roles(tmp_path):
    both, _, (actor, critic) = make(tmp_path)
    critic.step_metrics = lambda: [{"critic-train/step": 4.0, "critic-train/loss": 1.0}]
    actor.step_metrics = lambda: [{"train/step": 4.0, "train/loss": 2.0}]
    both_rows = [{"train/step": 4.0, "train/loss": 2.0, "critic-train/step": 4.0, "critic-train/loss": 1.0}]
    assert both.step_metrics() == both_rows
    actor.step_metrics = list
    assert both.step_metrics() == [{"train/step": 4.0, "critic-train/step": 4.0, "critic-train/loss": 1.0}]


def test_a_critic_goes_with_its_actor(tmp_path):
    both, _, _ = make(tmp_path, keep=2)
    root = tmp_path / "ckpt"
    for role_dir, iterations in ((root, (1, 2)), (root / "critic", (0, 1, 2, 9))):
        for iteration in iterations:
            (role_dir / f"iter_{iteration:07d}").mkdir(parents=True)
    both.save(2)
    # 9 is newer: another run's, or one whose actor was never written.
    assert sorted(path.name for path in Path(root / "critic").iterdir()) == [
        "iter_0000001",
        "iter_0000002",
        "iter_0000009",
    ]


def test_what_is_written_in_the_background_is_the_actors_part(tmp_path):
    both, _, (actor, _) = make(tmp_path)
    finished = []
    actor.finish_save = finished.append
    actor.last_complete_save = lambda: 3
    both.save(3)
    both.finish_save(5.0)
    assert finished == [5.0]
    assert both.last_complete_save() == 3
