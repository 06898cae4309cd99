"""The order of things inside a step, seen on stand-ins that record who was asked for what."""

from dataclasses import replace

import pytest

from slime.cluster.device_turns import DeviceTurns
from slime.cluster.entry import exit_code
from slime.config import (
    CheckpointConfig,
    EvalConfig,
    WeightsConfig,
)
from slime.errors import WeightSyncError
from slime.observability.logprob_diagnosis import LogprobFacts
from slime.observability.logprob_monitor import LogprobMonitor
from slime.observability.tracking import read_metrics
from tests.support.run_stand_ins import Engines, loop


def test_colocated_sides_take_turns(make_run, tmp_path):
    save = CheckpointConfig(save=str(tmp_path / "ckpt"), save_interval=1, save_hf=str(tmp_path / "hf-{rollout_id}"))
    run, devices = make_run(colocate=True, num_rollout=1, checkpoint=save)
    loop(run)
    meet = ["trainer holds parameters", "engines resume weights"]
    part = ["trainer sleeps", "engines resume kv_cache+cuda_graph"]
    step = ["generate 0", "engines release", "trainer wakes", "train batch 0", "save 0", "export hf-0"]
    assert devices.log == [*meet, "connect", "update", *part, *step, *meet, "update", *part]


@pytest.mark.parametrize("method", ["hold_parameters", "sleep"])
def test_an_interrupted_turn_leaves_nobody_thought_awake(make_run, tmp_path, method):
    run, devices = make_run(colocate=True, checkpoint=CheckpointConfig(save=str(tmp_path / "ckpt")))
    run.sync_weights()
    with run.generating():
        rollout = run.rollout.generate(0)
    with run.training():
        run.trainer.train(0, rollout)
    move = getattr(run._group, method)

    def interrupted():
        move()  # the ranks finish what they were asked
        raise KeyboardInterrupt

    setattr(run._group, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.sync_weights()
    run.save_before_exit(5)
    assert devices.log[-2:] == ["trainer wakes", "save 0"]


def test_a_trainer_that_moves_alone_wakes_for_each_step(make_run):
    run, devices = make_run(offload_train=True)
    run.sync_weights()
    rollout = run.rollout.generate(0)
    with run.training():
        run.trainer.train(0, rollout)
    step = ["generate 0", "trainer wakes", "train batch 0"]
    assert devices.log == ["trainer holds parameters", "connect", "update", "trainer sleeps", *step]


def test_weights_in_the_middle_of_a_rollout_come_from_a_trainer_that_is_there(make_run):
    run, devices = make_run(offload_train=True, recovers=True)
    run.sync_weights()
    first = len(devices.log)
    run._recovery.bring_weights()
    assert devices.log[first:] == ["trainer holds parameters", "update", "trainer sleeps"]


def test_an_engine_replaced_inside_a_sync_holds_what_the_others_hold(make_run):
    run, devices = make_run(colocate=True, recovers=True)
    update = run._group.update_weights

    def dies_once(check):
        run._group.update_weights = update
        run._recovery.deaths = 1
        raise WeightSyncError("engine 0: connection lost")

    run._group.update_weights = dies_once
    run._group.drain = lambda timeout_seconds: devices.note("drain")
    run.sync_weights()
    meet = ["trainer holds parameters", "engines resume weights", "connect"]
    again = ["drain", "trainer sleeps", "new engine without kv_cache+cuda_graph", "trainer holds parameters", "connect"]
    assert devices.log == [*meet, *again, "update", "trainer sleeps", "engines resume kv_cache+cuda_graph"]


def test_an_engine_replaced_while_engines_are_away_is_away_as_well(make_run):
    run, devices = make_run(colocate=True, recovers=True)
    run._recovery.deaths = 1
    run.sync_weights()
    assert devices.log[:2] == ["trainer sleeps", "new engine without weights+kv_cache+cuda_graph"]
    assert run._turns.released_tags() == ()


def test_memory_of_every_moment_is_recorded_on_gpus(make_run, tmp_path):
    run, _ = make_run(colocate=True, num_rollout=1)
    run._group.device_memory = lambda: {"device_bytes": 3.0, "trainer_bytes": 2.0}
    cluster = replace(run.config.cluster, device="cuda")
    run._turns = DeviceTurns(cluster, run._group, run._engines)
    loop(run)
    row = next(r for r in read_metrics(tmp_path / "metrics.jsonl") if "rollout/step" in r)
    moments = ("engines_released", "trainer_awake", "weights_meet", "trainer_asleep", "engines_awake")
    for moment in moments:
        assert row[f"memory/{moment}_device_bytes"] == 3.0
        assert row[f"memory/{moment}_trainer_bytes"] == 2.0


def test_engines_are_connected_again_only_when_they_changed(make_run):
    run, devices = make_run()
    run.sync_weights()
    run.sync_weights()
    moved = replace(Engines.endpoints[1], url="http://c")
    run._engines.endpoints = (Engines.endpoints[0], moved)
    run.sync_weights()
    run.sync_weights()
    assert devices.log == ["connect", "update", "update", "connect", "update", "update"]


def test_a_logprob_difference_above_the_bound_ends_the_run_before_the_next_rollout(make_run, caplog):
    monitor = LogprobMonitor(0.01, stop=True, facts=LogprobFacts)
    run, devices = make_run(num_rollout=3, logprob_monitor=monitor)
    differences = iter([0.001, 0.5])

    def train(batch, rollout_id):
        devices.note(f"train {batch}")
        return {"train/train_rollout_logprob_abs_diff": next(differences)}

    run.trainer._group.train = train
    assert exit_code(lambda: loop(run)) == 1
    assert "generate 1" in devices.log
    assert "generate 2" not in devices.log
    assert "the run failed: TrainerError: rollout 1: trainer and engine log-probs differ by 0.5" in caplog.text


def test_split_never_moves_memory(make_run):
    run, devices = make_run(num_rollout=2)
    loop(run)
    assert devices.log == [
        "connect",
        "update",
        "generate 0",
        "train batch 0",
        "update",
        "generate 1",
        "train batch 1",
        "update",
    ]


def test_evaluation_before_training_and_when_due(make_run):
    evaluation = EvalConfig(eval_interval=2, eval_prompt_data=("held", "x"))
    run, devices = make_run(num_rollout=3, eval=evaluation)
    loop(run)
    assert [e for e in devices.log if e.startswith("evaluate")] == ["evaluate 0", "evaluate 1"]
    resumed, devices = make_run(num_rollout=3, first_step=1, eval=evaluation)
    loop(resumed)
    assert [e for e in devices.log if e.startswith(("evaluate", "train b"))] == [
        "train batch 1",
        "evaluate 1",
        "train batch 2",
    ]
    only, devices = make_run(num_rollout=0, eval=EvalConfig(eval_interval=1, skip_eval_before_train=True))
    loop(only)
    assert [e for e in devices.log if e.startswith("evaluate")] == ["evaluate 0"]


def test_only_the_last_step_is_saved_without_an_interval(make_run, tmp_path):
    run, _ = make_run(num_rollout=3, checkpoint=CheckpointConfig(save=str(tmp_path / "ckpt")))
    assert [run.save_due(step) for step in range(3)] == [False, False, True]


def test_updates_follow_the_interval_and_the_last_step(make_run):
    run, _ = make_run(num_rollout=5, weights=WeightsConfig(update_weights_interval=2))
    assert [run.sync_due(step) for step in range(5)] == [False, True, False, True, True]


def test_an_engine_on_another_version_stops_the_run(make_run):
    run, _ = make_run()
    run._engines.weight_versions = lambda: ["1", "0"]
    with pytest.raises(WeightSyncError, match="http://b has 0"):
        run.sync_weights()


def test_transfer_and_whole_sync_are_two_numbers(make_run, tmp_path):
    run, _ = make_run(num_rollout=1)
    update = run._group.update_weights
    run._group.update_weights = lambda check: update(check) | {"perf/update_weights_time": 0.0}
    loop(run)
    row = next(r for r in read_metrics(tmp_path / "metrics.jsonl") if "rollout/step" in r)
    assert row["perf/update_weights_time"] == 0.0
    assert row["perf/sync_time"] > 0


def test_step_records_have_times_and_throughput(make_run, tmp_path):
    run, _ = make_run(num_rollout=1)
    loop(run)
    row = next(r for r in read_metrics(tmp_path / "metrics.jsonl") if "rollout/step" in r)
    assert row["perf/step_time"] >= row["perf/train_time"] >= 0
    assert row["perf/samples_per_sec"] == pytest.approx(2 / row["perf/step_time"])
    assert 0 <= row["perf/wait_time_ratio"] <= 1
