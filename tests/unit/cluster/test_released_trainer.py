"""Processes that end and come back: they continue the last checkpoint, and nothing trained is ever given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slime.cluster.released_trainer import ReleasedTrainer
from slime.config import CheckpointConfig, Config, MegatronConfig
from slime.errors import TrainerError
from slime.weights.endpoint import EngineEndpoint

ENGINE = EngineEndpoint(url="http://e", name="engine 0", backend="embedded")


class Disk:
    """What outlives the processes."""

    def __init__(self) -> None:
        self.groups: list[Processes] = []
        self.newest: int | None = None

    def start(self) -> Processes:
        self.groups.append(Processes(self))
        return self.groups[-1]


class Processes:
    """One generation of training processes: counts what was trained, forgets it when it ends."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.closed = False
        self.version = 0
        self.changed = True
        self.engines: tuple[EngineEndpoint, ...] = ()
        self.config = Config()

    def init(self, config: Config) -> int:
        self.config = config
        self.trained = self.disk.newest if config.checkpoint.resume else None
        return 0 if self.trained is None else self.trained + 1

    def connect_engines(self, endpoints: Any, check: Any = None) -> None:
        self.engines = tuple(endpoints)

    def begin(self, method: str, version: int, weights_changed: bool) -> tuple[int, bool]:
        assert method == "continue_version"
        return version, weights_changed

    def finish(self, told: tuple[int, bool], doing: str) -> None:
        self.version, self.changed = told

    def train(self, batch: Any, rollout_id: int) -> dict[str, float]:
        assert rollout_id == (0 if self.trained is None else self.trained + 1)
        self.trained, self.changed = rollout_id, True
        return {"train/loss": float(rollout_id)}

    def save(self, rollout_id: int, timeout_seconds: float | None) -> None:
        assert self.trained == rollout_id
        self.disk.newest = rollout_id

    def finish_save(self, timeout_seconds: float | None = None) -> None:
        assert not self.closed

    def last_complete_save(self) -> int | None:
        return self.disk.newest

    def update_weights(self, check: Any) -> dict[str, float]:
        assert self.engines == (ENGINE,)
        self.version += self.changed
        self.changed = False
        return {}

    def weight_version(self) -> int:
        return self.version

    def close(self, timeout_seconds: float) -> None:
        self.closed = True


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def trainer(disk: Disk) -> Any:
    made: Any = ReleasedTrainer(disk.start)
    values = {"no_load_optim": True, "lr": 1.0}
    megatron = MegatronConfig(argv=(), explicit=frozenset(), values=values)
    checkpoint = CheckpointConfig(load="hf", save="ckpt", start_rollout_id=0)
    assert made.init(replace(Config(), checkpoint=checkpoint, megatron=megatron)) == 0
    made.connect_engines([ENGINE])
    made.update_weights()
    made.sleep()
    return made


def test_new_processes_continue_where_the_old_ended(trainer: Any, disk: Disk) -> None:
    for step in range(3):
        trainer.wake_up()
        assert trainer.train("batch", step) == {"train/loss": step}
        trainer.save(step)
        trainer.hold_parameters()
        trainer.update_weights()
        assert trainer.weight_version() == step + 2
        trainer.sleep()
    assert [group.closed for group in disk.groups] == [True] * 4
    first, *later = disk.groups[1:]
    assert (first.config.checkpoint.load, first.config.checkpoint.resume) == ("hf", False)  # nothing was saved yet
    for group in later:
        checkpoint = group.config.checkpoint
        assert (checkpoint.load, checkpoint.resume, checkpoint.start_rollout_id) == ("ckpt", True, None)
        assert group.config.megatron.values == {"no_load_optim": False, "no_load_rng": False, "lr": 1.0}


def test_asleep_and_awake_twice_is_once(trainer: Any, disk: Disk) -> None:
    trainer.sleep()
    trainer.wake_up()
    trainer.wake_up()
    assert len(disk.groups) == 2
    trainer.update_weights()  # nothing was trained: the engines have this version
    assert trainer.weight_version() == 1


def test_weights_that_no_engine_has_get_a_version_of_their_own(trainer: Any) -> None:
    trainer.wake_up()
    trainer.train("batch", 0)
    trainer.save(0)
    trainer.sleep()  # to make room for an engine that died, before the weights were sent
    trainer.hold_parameters()
    trainer.update_weights()
    assert trainer.weight_version() == 2
    trainer.sleep()
    trainer.hold_parameters()
    trainer.update_weights()  # the same once more, for a new engine
    assert trainer.weight_version() == 2


def test_what_is_not_saved_is_not_given_up(trainer: Any, disk: Disk) -> None:
    trainer.wake_up()
    trainer.train("batch", 0)
    with pytest.raises(TrainerError, match="rollout 0 was trained and not saved"):
        trainer.sleep()
    assert not disk.groups[-1].closed


def test_another_checkpoint_than_the_last_is_refused(trainer: Any, disk: Disk) -> None:
    trainer.wake_up()
    trainer.train("batch", 0)
    trainer.save(0)
    trainer.sleep()
    disk.newest = 4
    with pytest.raises(TrainerError, match="checkpoint of rollout 0 was to be continued, found that of 4"):
        trainer.wake_up()


def test_ended_processes_are_named(trainer: Any) -> None:
    trainer.finish_save()
    trainer.wait_idle(1.0)
    assert trainer.last_complete_save() is None
    with pytest.raises(TrainerError, match="--release-train ended them"):
        trainer.train("batch", 0)
    trainer.close()
