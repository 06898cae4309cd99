"""When a run saves, and that it saves before it ends, seen on the same stand-ins."""

import pytest

from slime.config import (
    CheckpointConfig,
)
from slime.errors import CheckpointError


def test_a_run_that_is_told_to_end_saves_what_it_trained_once(make_run, tmp_path):
    run, devices = make_run(checkpoint=CheckpointConfig(save=str(tmp_path / "ckpt")))
    run.save_before_exit(1)
    assert not any(e.startswith("save") for e in devices.log)
    run.trainer.train(0, run.rollout.generate(0))
    run.trainer.in_progress = run.rollout.generate(1).report  # interrupted; complete once the ranks are idle
    run.save_before_exit(1)
    run.trainer.last_trained, run.trainer.in_progress = run.trainer.in_progress, None
    run.save_before_exit(1)
    assert [e for e in devices.log if e.startswith("save ")] == ["save 1"]
    assert state_file(tmp_path, 1).read_text() == "state after 1"
    (limit,) = run._group.save_limits
    assert 0 < limit <= 1  # what is left of the whole time, not the bound of an ordinary save


def test_a_save_needs_nothing_of_a_rollout_process_that_is_busy_ahead(make_run, tmp_path):
    run, devices = make_run(num_rollout=4, checkpoint=CheckpointConfig(save=str(tmp_path / "ckpt")))
    rollouts = [run.rollout.generate(step) for step in range(3)]
    asked = len(devices.log)
    run.trainer.train(0, rollouts[0])
    run.save(0)
    assert devices.log[asked:] == ["train batch 0", "save 0"]
    assert state_file(tmp_path, 0).read_text() == "state after 0"


def test_told_to_end_while_colocated_engines_generate_it_ends_them_first(make_run, tmp_path):
    run, devices = make_run(colocate=True, checkpoint=CheckpointConfig(save=str(tmp_path / "ckpt")))
    run.sync_weights()
    rollout = run.rollout.generate(0)
    with run.training():
        run.trainer.train(0, rollout)
    with run.generating():
        assert "kv_cache" in devices.engines
    run.save_before_exit(5)
    assert devices.log[-3:] == ["engines end", "trainer wakes", "save 0"]


def test_told_to_end_it_starts_no_engine_again(make_run, tmp_path):
    save = CheckpointConfig(save=str(tmp_path / "ckpt"))
    run, devices = make_run(colocate=True, recovers=True, checkpoint=save)
    run.sync_weights()
    rollout = run.rollout.generate(0)
    with run.training():
        run.trainer.train(0, rollout)
    with run.generating():
        run.save_before_exit(5)
    assert devices.log[-4:] == ["recovery ends", "engines end", "trainer wakes", "save 0"]


def state_file(tmp_path, step):
    return tmp_path / "ckpt" / "rollout" / f"global_dataset_state_dict_{step}.pt"


@pytest.fixture
def background(make_run, tmp_path):
    checkpoint = CheckpointConfig(save=str(tmp_path / "ckpt"), save_interval=1, keep_checkpoints=1, async_save=True)
    run, devices = make_run(num_rollout=3, checkpoint=checkpoint)
    rollouts = [run.rollout.generate(step) for step in range(3)]

    def train_and_save(step):
        run.trainer.train(step, rollouts[step])
        run.save(step)

    return run, devices, train_and_save


def saves(devices):
    return [e for e in devices.log if "save" in e]


def test_a_save_in_the_background_counts_when_the_trainer_says_so(background, tmp_path):
    run, devices, train_and_save = background
    steps = run.steps()
    train_and_save(next(steps))
    assert run._last_saved is None
    next(steps)
    assert run._last_saved is None
    run._group.last = 0
    next(steps)
    assert run._last_saved == 0
    run.finish_save()
    assert saves(devices) == ["save 0"]


def test_the_next_save_and_the_end_of_the_run_wait_for_it(background, tmp_path):
    run, devices, train_and_save = background
    train_and_save(0)
    train_and_save(1)
    assert saves(devices) == ["save 0", "finish save 0", "save 1"]
    assert run._last_saved == 0
    (tmp_path / "ckpt" / "iter_0000001").mkdir()
    run.finish_save()
    assert run._last_saved == 1
    assert not state_file(tmp_path, 0).exists()  # pruned with its checkpoint, but not before the next was complete
    assert state_file(tmp_path, 1).exists()


def test_told_to_end_it_completes_the_save_within_the_time_that_is_left(background):
    run, devices, train_and_save = background
    train_and_save(0)
    run.save_before_exit(1)
    assert saves(devices) == ["save 0", "finish save 0"]
    run.trainer.train(1, run.rollout.generate(1))
    run.save_before_exit(1)
    assert saves(devices)[2:] == ["save 1", "finish save 1"]
    assert all(0 < limit <= 1 for limit in run._group.finish_limits)


def test_a_save_that_failed_in_the_background_never_counts(background):
    run, _, train_and_save = background
    train_and_save(0)

    def fail(timeout_seconds):
        raise CheckpointError("no space left")

    run._group.finish_save = fail
    with pytest.raises(CheckpointError, match="no space left"):
        run.finish_save()
    run._group.finish_save = lambda timeout_seconds: None  # the ranks have nothing in progress any more
    run.finish_save()
    assert run._last_saved is None
