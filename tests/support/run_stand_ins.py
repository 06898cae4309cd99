"""A ``Run`` on stand-ins that record who was asked for what, and a loop over it."""

from contextlib import contextmanager, nullcontext
from pathlib import Path

from slime.cluster.rollout import RolloutReport
from slime.cluster.run import Run
from slime.config import (
    ClusterConfig,
    Config,
)
from slime.observability.report import Reporter
from slime.observability.tracking import TrackingOptions, init_tracking
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


@contextmanager
def run_maker(tmp_path):
    """A function that makes a run below ``tmp_path`` from settings; closes what it made."""
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
