"""Runs that are told to end, at moments that matter: nothing stays behind, and SIGTERM saves first."""

import os
import signal
import time

import pytest

from tests.e2e.commands import arguments, assert_nothing_left, make_inputs, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def signalled(process, signum, reached, seconds=30):
    """Send a signal to the whole group, as a terminal or a scheduler does, when ``reached``; the exit code."""
    try:
        wait_for(lambda: reached() or process.poll() is not None, "the moment")
        assert process.poll() is None
        os.killpg(process.pid, signum)
        return process.wait(seconds)
    finally:
        process.kill()
        process.wait(10)


def assert_quiet(log):
    text = log.read_text()
    assert "Traceback" not in text
    assert "RayTaskError" not in text


@pytest.mark.parametrize("seconds", [0.3, 1.0, 4.0, 8.0])
def test_ctrl_c_while_a_run_starts(inputs, tmp_path, seconds):
    process = start("train.py", arguments(inputs, tmp_path / "out", 1000), tmp_path / "log")
    began = time.monotonic()
    assert signalled(process, signal.SIGINT, lambda: time.monotonic() - began > seconds) == 130
    assert_nothing_left(str(tmp_path))
    assert_quiet(tmp_path / "log")


@pytest.mark.parametrize("script", ["train.py", "train_async.py"])
def test_ctrl_c_inside_evaluation_and_with_rollouts_ahead(inputs, tmp_path, script):
    extra = ["--eval-prompt-data", "held", str(inputs["eval.jsonl"]), "--eval-interval", "1", "--eval-temperature", "0"]
    stall = "stall_evaluation" if script == "train.py" else "stall_second_rollout"
    extra += ["--custom-rm-path", f"{inputs['plugins.py']}:{stall}"]
    argv = arguments(inputs, tmp_path / "out", 1000, *(extra if script == "train.py" else extra[-2:]))
    process = start(script, argv, tmp_path / "log")
    assert signalled(process, signal.SIGINT, (tmp_path / "out" / "reached").exists) == 130
    assert_nothing_left(str(tmp_path))
    assert_quiet(tmp_path / "log")


def test_ctrl_c_inside_a_save(inputs, tmp_path):
    extra = ["--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    process = start("train.py", arguments(inputs, tmp_path / "out", 1000, *extra), tmp_path / "log")
    assert signalled(process, signal.SIGINT, lambda: list((tmp_path / "ckpt").glob(".iter_*.saving"))) == 130
    assert_nothing_left(str(tmp_path))
    assert_quiet(tmp_path / "log")
    tracker = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    assert not tracker.exists() or (tmp_path / "ckpt" / f"iter_{int(tracker.read_text()):07d}").is_dir()


def test_ctrl_c_inside_a_weight_sync(inputs, tmp_path):
    hook = ["--custom-megatron-before-train-step-hook-path", f"{inputs['plugins.py']}:stop_engine"]
    process = start("train.py", arguments(inputs, tmp_path / "out", 1000, *hook), tmp_path / "log")
    reached = []

    def in_sync():
        if not reached and (tmp_path / "out" / "reached").exists():
            reached.append(time.monotonic())
        return bool(reached) and time.monotonic() > reached[0] + 2

    assert signalled(process, signal.SIGINT, in_sync) == 130
    assert_nothing_left(str(tmp_path))
    assert_quiet(tmp_path / "log")


@pytest.mark.parametrize(
    ("script", "signum", "code"), [("train.py", signal.SIGTERM, 143), ("train_async.py", signal.SIGHUP, 129)]
)
def test_told_to_end_during_generation_it_saves_what_was_trained_within_the_bound(
    inputs, tmp_path, script, signum, code
):
    bound = 20
    extra = ["--save", str(tmp_path / "ckpt"), "--sigterm-save-timeout-seconds", str(bound)]
    extra += ["--custom-rm-path", f"{inputs['plugins.py']}:stall_second_rollout"]
    extra += ["--update-weights-interval", "1000"] if script == "train_async.py" else []  # a sync would wait for it
    process = start(script, arguments(inputs, tmp_path / "out", 1000, *extra), tmp_path / "log")
    metrics = tmp_path / "out" / "metrics.jsonl"

    def trained_and_generating():
        return (tmp_path / "out" / "reached").exists() and "train/loss" in metrics.read_text()

    assert signalled(process, signum, trained_and_generating, seconds=bound) == code, (tmp_path / "log").read_text()
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "0"
    assert (tmp_path / "ckpt" / "rollout" / "global_dataset_state_dict_0.pt").exists()
    assert (tmp_path / "ckpt" / "iter_0000000").is_dir()
    assert_nothing_left(str(tmp_path))
    assert_quiet(tmp_path / "log")
