"""The order of things inside a step, seen on stand-ins that record who was asked for what."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from slime.cluster.device_turns import DeviceTurns
from slime.cluster.entry import exit_code
from slime.cluster.rollout import RolloutReport
from slime.cluster.run import Run
from slime.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    EvalConfig,
    WeightsConfig,
)
from slime.errors import CheckpointError, WeightSyncError
from slime.observability.logprob_diagnosis import LogprobFacts
from slime.observability.logprob_monitor import LogprobMonitor
from slime.observability.report import Reporter
from slime.observability.tracking import TrackingOptions, init_tracking, read_metrics
from slime.weights.endpoint import EngineEndpoint


class Devices:
    """Who holds the device memory; of both sides, only weights may be there at once."""

    def __init__(self, shared):
        self.log = []
        self.shared = shared
        self.trainer = {"parameters", "optimizer"}
        self.engines = set()

    def note(self, event):
        if self.shared and self.trainer and self.engines:
            meeting = {"parameters", "weights"}
            assert self.trainer | self.engines == meeting, f"{self.trainer | self.engines} at {event}; {self.log}"
        self.log.append(event)


class Engines:
    urls = ("http://a", "http://b")
    endpoints = tuple(EngineEndpoint(url=url, name=url, backend="embedded") for url in urls)

    def __init__(self, devices):
        self.devices = devices
        self.versions = ["default", "default"]

    def release_memory(self, tags=None):
        self.devices.engines = set()
        self.devices.note("engines release")

    def resume_memory(self, tags=None):
        self.devices.engines |= set(tags)
        self.devices.note(f"engines resume {'+'.join(tags)}")

    def weight_versions(self):
        return self.versions

    def close(self, timeout_seconds):
        self.devices.engines = set()
        self.devices.note("engines end")

    def check(self):
        pass

    def getting_weights(self):
        return nullcontext()


class Trainer:
    def __init__(self, devices, engines):
        self.devices, self.engines = devices, engines
        self.version = 0
        self.save_limits, self.finish_limits = [], []
        self.saving = self.last = None

    def wake_up(self, timeout_seconds=None):
        self.devices.trainer = {"parameters", "optimizer"}
        self.devices.note("trainer wakes")

    def hold_parameters(self):
        self.devices.trainer = {"parameters"}
        self.devices.note("trainer holds parameters")

    def sleep(self):
        self.devices.trainer = set()
        self.devices.note("trainer sleeps")

    def connect_engines(self, endpoints, check):
        self.devices.note("connect")

    def update_weights(self, check):
        assert "parameters" in self.devices.trainer
        self.version += 1
        self.engines.versions = [str(self.version)] * 2
        self.devices.note("update")
        return {"perf/update_weights_bytes": 8.0}

    def weight_version(self):
        return self.version

    def train(self, batch, rollout_id):
        assert "optimizer" in self.devices.trainer
        assert batch == f"batch {rollout_id}"
        self.devices.note(f"train {batch}")
        return {"train/loss": 0.1}

    def step_metrics(self):
        return []

    def save(self, step, timeout_seconds=None):
        assert "optimizer" in self.devices.trainer
        self.devices.note(f"save {step}")
        self.save_limits.append(timeout_seconds)
        self.saving = step

    def finish_save(self, timeout_seconds=None):
        self.devices.note(f"finish save {self.saving}")
        self.finish_limits.append(timeout_seconds)
        self.last = self.saving

    def last_complete_save(self):
        return self.last

    def save_hf(self, path):
        self.devices.note(f"export {Path(path).name}")

    def wait_idle(self, timeout_seconds):
        self.devices.note("wait idle")


class Recovery:
    """An engine for each of ``deaths`` is replaced at the next chance."""

    def __init__(self, devices):
        self.devices, self.deaths = devices, 0

    def match_memory(self, released):
        self.released = released

    def bring_weights_with(self, bring_weights):
        self.bring_weights = bring_weights

    def look(self):
        return bool(self.deaths)

    def settle(self):
        if self.deaths:
            self.deaths -= 1
            self.devices.note(f"new engine without {'+'.join(self.released())}")

    def found_cause(self):
        return bool(self.deaths)

    def serve(self):
        pass

    def watch(self):
        pass

    def rollout_complete(self):
        return {}

    def close(self):
        self.devices.note("recovery ends")


class Rollouts:
    def __init__(self, devices, must_be_awake):
        self.devices, self.must_be_awake = devices, must_be_awake

    def submit(self, step):
        assert "kv_cache" in self.devices.engines or not self.must_be_awake
        self.devices.note(f"generate {step}")
        return f"batch {step}", step

    def report(self, reference, step):
        return RolloutReport(
            rollout_id=step,
            num_samples=2,
            metrics={"rollout/raw_reward": 0.5},
            plugin_rows=[],
            data_state=f"state after {step}".encode(),
        )

    def evaluate(self, step):
        assert "kv_cache" in self.devices.engines or not self.must_be_awake
        self.devices.note(f"evaluate {step}")
        return {"eval/held": 0.5}, []


@pytest.fixture
def make_run(tmp_path):
    reporters = []

    def make(
        *,
        colocate=False,
        offload_train=None,
        recovers=False,
        num_rollout=2,
        first_step=0,
        logprob_monitor=None,
        **sections,
    ):
        offload_train = colocate if offload_train is None else offload_train
        cluster = ClusterConfig(device="cpu", colocate=colocate, offload_train=offload_train, offload_rollout=colocate)
        config = Config(cluster=cluster, **sections)
        devices = Devices(colocate)
        engines = Engines(devices)
        reporter = Reporter(
            init_tracking(TrackingOptions(run_dir=tmp_path)),
            num_rollout=num_rollout,
            progress=False,
            logprob_monitor=logprob_monitor,
        )
        reporters.append(reporter)
        run = Run(
            config,
            run_dir=tmp_path,
            reporter=reporter,
            rollout=Rollouts(devices, colocate),
            engines=engines,
            trainer=Trainer(devices, engines),
            first_step=first_step,
            num_rollout=num_rollout,
            num_rollout_per_epoch=None,
            recovery=Recovery(devices) if recovers else None,
        )
        return run, devices

    yield make
    for reporter in reporters:
        reporter.close()


def loop(run):
    run.sync_weights()
    run.evaluate_before_training()
    for step in run.steps():
        with run.generating():
            rollout = run.rollout.generate(step)
        with run.training():
            run.trainer.train(step, rollout)
        if run.save_due(step):
            run.save(step)
        run.sync_weights()
        if run.eval_due(step):
            run.evaluate(step)


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
