"""``python train.py`` as a user runs it: Ray, a trainer, an engine, the router, a few rollouts and more."""

import json
import math
import os
import signal

import pytest

from slime.config import Config
from slime.data.record import load_rollout
from slime.observability.tracking import read_metrics
from tests.e2e.commands import (
    arguments,
    assert_nothing_left,
    make_inputs,
    processes_of,
    run,
    run_on_terminal,
    series,
    start,
    wait_for,
    without,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def epoch(inputs, tmp_path_factory):
    """One epoch (six rollouts) on a terminal, with evaluation, checkpoint, export and dumps."""
    folder = tmp_path_factory.mktemp("epoch")
    extra = ["--save", str(folder / "ckpt"), "--save-hf", str(folder / "hf" / "{rollout_id}")]
    extra += ["--eval-prompt-data", "held", str(inputs["eval.jsonl"]), "--eval-interval", "3"]
    extra += ["--eval-temperature", "0", "--entropy-coef", "0.01"]
    extra += ["--save-debug-rollout-data", str(folder / "dumps" / "{rollout_id}.pt")]
    extra += ["--custom-rm-path", f"{inputs['plugins.py']}:slowly", "--num-epoch", "1"]
    argv = without(arguments(inputs, folder / "out", 0, *extra), "--num-rollout")
    code, shown = run_on_terminal("train.py", argv)
    assert code == 0, shown
    assert_nothing_left(str(folder))
    return folder, shown


def test_every_rollout_has_its_line_and_its_numbers(epoch):
    folder, shown = epoch
    rows = read_metrics(folder / "out" / "metrics.jsonl")
    assert [row["rollout/step"] for row in rows if "rollout/step" in row] == list(range(6))
    losses, norms = series(folder / "out", "train/loss"), series(folder / "out", "train/grad_norm")
    assert len(losses) == 6
    assert all(math.isfinite(value) for value in losses + norms)
    assert all(norm > 0 for norm in norms)
    differences = series(folder / "out", "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 6
    assert max(differences) < 1e-4  # the engine computes what the trainer trains, also after updates
    for step, difference in enumerate(differences, start=1):
        (line,) = [line for line in shown.splitlines() if f"rollout {step}/6 |" in line]
        assert f"logprob diff {difference:.1e}" in line


def test_evaluation_before_and_after_is_in_the_summary(epoch):
    folder, shown = epoch
    scores = series(folder / "out", "eval/held")
    assert len(scores) == 3
    summary = shown.partition("the run is complete")[2]
    assert "held-out held" in summary
    assert f"{scores[0]:.4f} -> {scores[-1]:.4f}" in summary


def test_bars_of_rollout_and_run_appear_on_a_terminal(epoch):
    _, shown = epoch
    assert any(f"rollout {step}: " in shown and "groups" in shown for step in range(6))
    assert "6/6" in shown


def test_a_run_leaves_its_files(epoch):
    folder, _ = epoch
    for path in ("reward.png", "logs/engine_0.log", "logs/router.log", "logs/trainer_0.log"):
        assert (folder / "out" / path).exists()
    assert list((folder / "out" / "tensorboard").rglob("events.out.*"))
    assert (folder / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "5"
    assert (folder / "ckpt" / "rollout" / "global_dataset_state_dict_5.pt").exists()
    saved = Config.from_json((folder / "ckpt" / "iter_0000005" / "slime_config.json").read_text())
    assert saved.data.num_rollout == 6  # --num-epoch, completed
    assert json.loads((folder / "hf" / "5" / "config.json").read_text())["model_type"] == "qwen3"


def test_dumped_samples_carry_their_spans(epoch):
    folder, _ = epoch
    for sample in load_rollout(str(folder / "dumps" / "{rollout_id}.pt"), 0):
        names = [event["name"] for event in vars(sample)["trace"]["events"] if event["kind"] == "span_end"]
        assert {"sglang_generate", "reward_model", "generate_and_rm"} <= set(names)


def test_a_recorded_rollout_trains_to_the_same_numbers_without_engines(epoch, inputs, tmp_path):
    folder, _ = epoch
    dumps = str(folder / "dumps" / "{rollout_id}.pt")
    extra = ["--entropy-coef", "0.01", "--load-debug-rollout-data", dumps]
    replayed = arguments(inputs, tmp_path / "out", 2, *extra)
    assert run("train.py", replayed, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    for key in ("train/loss", "train/grad_norm"):
        assert series(tmp_path / "out", key) == series(folder / "out", key)[:2]
    assert not (tmp_path / "out" / "logs" / "engine_0.log").exists()


def test_killed_after_a_checkpoint_it_resumes_with_the_same_losses(inputs, tmp_path):
    # An entropy term, because the loss of one on-policy GRPO step is zero whatever was sampled. One request at a time
    # and no prefix cache, because the last digit of a log-prob depends on what is computed beside it, and with a
    # little bad luck a sampled token does too.
    common = ["--sglang-enable-deterministic-inference", "--sglang-max-running-requests", "1"]
    common += ["--sglang-disable-radix-cache", "--entropy-coef", "0.01", "--save-interval", "2"]
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


def test_async_trains_every_step_with_bounded_staleness(inputs, tmp_path):
    ahead, interval, steps = 2, 2, 6
    dumps = str(tmp_path / "dumps" / "{rollout_id}.pt")
    extra = ["--async-buffer-size", str(ahead), "--update-weights-interval", str(interval)]
    argv = arguments(inputs, tmp_path / "out", steps, *extra, "--save-debug-rollout-data", dumps)
    assert run("train_async.py", argv, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert series(tmp_path / "out", "train/step") == list(range(steps))
    staleness = []
    for step in range(steps):
        (version,) = {v for sample in load_rollout(dumps, step) for v in sample.weight_versions}
        trained = (int(version) - 1) * interval  # optimizer steps in the weights that generated this rollout
        staleness.append(step - trained)
    assert max(staleness) <= ahead + interval - 1
    assert max(staleness) > 0  # it did run ahead
    assert_nothing_left(str(tmp_path))


def test_two_ranks_and_two_engines_take_turns_colocated(inputs, tmp_path):
    counts = ["--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2"]
    counts += ["--tensor-model-parallel-size", "2"]
    bound = ["--max-logprob-diff", "1e-4", "--max-logprob-diff-action", "stop"]
    argv = arguments(inputs, tmp_path / "out", 3, *counts, *bound)
    assert run("train.py", argv, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert len(series(tmp_path / "out", "train/loss")) == 3
    assert (tmp_path / "out" / "logs" / "trainer_1.log").exists()
    assert (tmp_path / "out" / "logs" / "engine_1.log").exists()
    assert_nothing_left(str(tmp_path))


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
