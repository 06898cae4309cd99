"""``python train.py`` as a user runs it: Ray, a trainer, an engine, the router, three rollouts and more."""

import json
import math
import os
import signal
import time

import pytest

from slime.config import Config
from slime.observability.tracking import read_metrics
from tests.e2e.commands import arguments, make_inputs, processes_of, run, series, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def wait_for(condition, what, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.1)


def assert_nothing_left(mark):
    """Processes of a run mention its directory in their arguments, or carry its mark in their environment."""
    wait_for(lambda: not processes_of(mark), f"end of {processes_of(mark)}", seconds=15)


def test_three_rollouts_with_evaluation_checkpoint_and_export(inputs, tmp_path):
    output, log = tmp_path / "out", tmp_path / "log"
    extra = ["--save", str(tmp_path / "ckpt"), "--save-hf", str(tmp_path / "hf" / "{rollout_id}")]
    extra += [
        "--eval-prompt-data",
        "held",
        str(inputs["eval.jsonl"]),
        "--eval-interval",
        "3",
        "--eval-temperature",
        "0",
    ]
    code = run("train.py", arguments(inputs, output, 3, *extra), log)
    text = log.read_text()
    assert code == 0, text
    assert_nothing_left(str(tmp_path))

    rows = read_metrics(output / "metrics.jsonl")
    assert [row["rollout/step"] for row in rows if "rollout/step" in row] == [0, 1, 2]
    losses, norms = series(output, "train/loss"), series(output, "train/grad_norm")
    assert len(losses) == 3
    assert all(math.isfinite(value) for value in losses + norms)
    assert all(norm > 0 for norm in norms)
    differences = series(output, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 3
    assert max(differences) < 1e-4  # the engine computes what the trainer trains, also after two updates
    assert len(series(output, "eval/held")) == 2
    assert text.count("rollout 3/3") == 1
    for path in ("reward.png", "logs/engine_0.log", "logs/router.log", "logs/trainer_0.log"):
        assert (output / path).stat().st_size >= 0
        assert (output / path).exists()
    assert list((output / "tensorboard").rglob("events.out.*"))
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert (tmp_path / "ckpt" / "rollout" / "global_dataset_state_dict_2.pt").exists()
    saved = Config.from_json((tmp_path / "ckpt" / "slime_config.json").read_text())
    assert saved.data.num_rollout == 3
    assert json.loads((tmp_path / "hf" / "2" / "config.json").read_text())["model_type"] == "qwen3"


def test_killed_after_a_checkpoint_it_resumes_with_the_same_losses(inputs, tmp_path):
    # An entropy term, because the loss of one on-policy GRPO step is zero whatever was sampled.
    common = ["--sglang-enable-deterministic-inference", "--entropy-coef", "0.01", "--save-interval", "2"]
    whole = arguments(inputs, tmp_path / "whole", 5, *common)
    assert run("train.py", whole, tmp_path / "whole.log") == 0, (tmp_path / "whole.log").read_text()

    checkpoint = tmp_path / "ckpt"
    argv = arguments(inputs, tmp_path / "part", 5, *common, "--save", str(checkpoint), "--load", str(checkpoint))
    process = start("train.py", argv, tmp_path / "part.log")
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    try:
        wait_for(lambda: tracker.exists() or process.poll() is not None, "checkpoint")
    finally:
        process.kill()
        process.wait(10)
    assert_nothing_left(str(tmp_path))
    assert run("train.py", argv, tmp_path / "rest.log") == 0, (tmp_path / "rest.log").read_text()

    def numbers(output, key):
        return {row["train/step"]: row[key] for row in read_metrics(output / "metrics.jsonl") if key in row}

    for key in ("train/loss", "train/grad_norm"):
        uninterrupted, resumed = numbers(tmp_path / "whole", key), numbers(tmp_path / "part", key)
        assert {2, 3, 4} <= set(resumed)
        assert resumed == {step: uninterrupted[step] for step in resumed}
    assert max(abs(loss) for loss in numbers(tmp_path / "part", "train/loss").values()) > 1e-3

    assert run("train.py", argv, tmp_path / "again.log") == 2
    assert "nothing left to train" in (tmp_path / "again.log").read_text()


@pytest.mark.parametrize("delay", [4.0, 8.0, 11.0, None])
def test_ctrl_c_at_any_moment_leaves_nothing(inputs, tmp_path, delay):
    output, log = tmp_path / "out", tmp_path / "log"
    process = start("train.py", arguments(inputs, output, 1000), log)
    try:
        if delay is None:
            wait_for(lambda: "rollout 1/1000" in log.read_text() or process.poll() is not None, "first rollout")
        else:
            time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)  # the whole group, like a terminal does
        assert process.wait(30) in (130, -signal.SIGINT)
    finally:
        process.kill()
        process.wait(10)
    assert_nothing_left(str(tmp_path))
    assert "RayTaskError" not in log.read_text()


def test_sigterm_saves_what_was_trained(inputs, tmp_path):
    log = tmp_path / "log"
    argv = arguments(inputs, tmp_path / "out", 1000, "--save", str(tmp_path / "ckpt"))
    process = start("train.py", argv, log)
    try:
        wait_for(lambda: "rollout 2/1000" in log.read_text() or process.poll() is not None, "second rollout")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.wait(10)
    last = int((tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
    assert last >= 1
    assert (tmp_path / "ckpt" / "rollout" / f"global_dataset_state_dict_{last}.pt").exists()
    assert_nothing_left(str(tmp_path))


def test_async_trains_every_step_with_bounded_staleness(inputs, tmp_path):
    argv = arguments(inputs, tmp_path / "out", 4, "--async-buffer-size", "2", "--update-weights-interval", "2")
    assert run("train_async.py", argv, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert [row["train/step"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "train/loss" in row] == [
        0,
        1,
        2,
        3,
    ]
    assert_nothing_left(str(tmp_path))


def test_two_ranks_and_two_engines_take_turns_colocated(inputs, tmp_path):
    counts = ["--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2"]
    argv = arguments(
        inputs, tmp_path / "out", 3, *counts, "--tensor-model-parallel-size", "2", "--max-logprob-diff", "1e-4"
    )
    assert run("train.py", [*argv, "--max-logprob-diff-action", "stop"], tmp_path / "log") == 0, (
        tmp_path / "log"
    ).read_text()
    assert len(series(tmp_path / "out", "train/loss")) == 3
    assert (tmp_path / "out" / "logs" / "trainer_1.log").exists()
    assert (tmp_path / "out" / "logs" / "engine_1.log").exists()
    assert_nothing_left(str(tmp_path))


def test_a_recorded_rollout_trains_to_the_same_numbers_without_engines(inputs, tmp_path):
    dumps = str(tmp_path / "dumps" / "{rollout_id}.pt")
    common = ["--entropy-coef", "0.01"]
    recorded = arguments(inputs, tmp_path / "a", 2, *common, "--save-debug-rollout-data", dumps)
    assert run("train.py", recorded, tmp_path / "a.log") == 0, (tmp_path / "a.log").read_text()
    replayed = arguments(inputs, tmp_path / "b", 2, *common, "--load-debug-rollout-data", dumps)
    assert run("train.py", replayed, tmp_path / "b.log") == 0, (tmp_path / "b.log").read_text()
    for key in ("train/loss", "train/grad_norm"):
        assert series(tmp_path / "b", key) == series(tmp_path / "a", key)
        assert len(series(tmp_path / "b", key)) == 2
    assert not (tmp_path / "b" / "logs" / "engine_0.log").exists()


def test_async_refuses_colocate(inputs, tmp_path):
    code = run("train_async.py", arguments(inputs, tmp_path / "out", 1, "--colocate"), tmp_path / "log")
    assert code == 2
    assert "--colocate" in (tmp_path / "log").read_text()


def test_a_dead_engine_stops_the_run_with_one_message(inputs, tmp_path):
    log = tmp_path / "log"
    process = start("train.py", arguments(inputs, tmp_path / "out", 1000), log)
    try:
        wait_for(lambda: "rollout 1/1000" in log.read_text() or process.poll() is not None, "first rollout")
        engine = next(p for p in processes_of(str(inputs["model"])) if "slime.engines.server" in p)
        os.kill(int(engine.split()[0]), signal.SIGKILL)
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait(10)
    text = log.read_text()
    assert "EngineError: engine 0" in text
    assert "SIGKILL" in text
    assert "RayTaskError" not in text
    assert "ray::" not in text
    assert_nothing_left(str(tmp_path))
