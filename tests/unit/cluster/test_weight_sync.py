"""The driver's side of a weight sync, on stand-ins that record who was asked for what."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from slime.cluster import weight_sync
from slime.cluster.weight_sync import WeightSync
from slime.errors import EngineError, WeightSyncError
from slime.weights.endpoint import EngineEndpoint


class Engines:
    def __init__(self, log):
        self.log = log
        self.endpoints = tuple(EngineEndpoint(url=f"http://{n}", name=n, backend="embedded") for n in "ab")
        self.versions = ["1", "1"]

    @property
    def urls(self):
        return [endpoint.url for endpoint in self.endpoints]

    def weight_versions(self):
        return self.versions

    def check(self):
        self.log.append("check")

    @contextmanager
    def getting_weights(self):
        yield


class Trainer:
    def __init__(self, log):
        self.log = log
        self.failures = []
        self.checks_while_connecting = False

    def connect_engines(self, endpoints, check):
        self.log.append("connect " + " ".join(endpoint.url for endpoint in endpoints))
        if self.checks_while_connecting:
            check()

    def update_weights(self, check):
        self.log.append("update")
        check()
        if self.failures:
            raise self.failures.pop(0)
        return {"perf/update_weights_time": 1.0}

    def weight_version(self):
        return 1

    def drain(self, timeout_seconds):
        self.log.append("drain")


class Recovery:
    """An engine that died is at another address when everything has settled."""

    def __init__(self, engines, dead=()):
        self.engines, self.dead, self.asked = engines, list(dead), 0
        self.replacing = False

    def look_while_updating(self):
        self.asked += 1
        return self.replacing

    def found_cause(self):
        return bool(self.dead)

    def settle(self):
        index = self.dead.pop(0)
        moved = replace(self.engines.endpoints[index], url="http://new")
        self.engines.endpoints = tuple(moved if i == index else e for i, e in enumerate(self.engines.endpoints))
        self.engines.log.append("settle")


@pytest.fixture
def parts(monkeypatch):
    log: list[str] = []

    def release(endpoints, *, has_session, timeout_seconds):
        assert has_session
        log.append("release " + " ".join(endpoint.url for endpoint in endpoints))

    monkeypatch.setattr(weight_sync, "release", release)
    return Trainer(log), Engines(log), log


def make_sync(trainer, engines, recovery):
    prepare = recovery.settle if recovery is not None else pytest.fail
    return WeightSync(trainer, engines, recovery, prepare=prepare, idle_seconds=1.0)


def test_without_a_recovery_the_engines_are_checked_and_a_failure_is_final(parts):
    trainer, engines, log = parts
    sync = make_sync(trainer, engines, None)
    assert sync.send() == {"perf/update_weights_time": 1.0}
    trainer.failures = [EngineError("gone")]
    with pytest.raises(EngineError, match="gone"):
        sync.send()
    assert log == ["connect http://a http://b", "update", "check", "update", "check", "release http://a http://b"]


def test_a_sync_that_an_engine_did_not_survive_is_made_again_with_its_replacement(parts):
    trainer, engines, log = parts
    trainer.failures = [WeightSyncError("refused")]
    recovery = Recovery(engines, dead=[1])
    make_sync(trainer, engines, recovery).send()
    again = ["drain", "settle", "connect http://a http://new", "update"]
    assert log == ["connect http://a http://b", "update", *again]
    assert recovery.asked == 2


def test_a_failure_that_is_nobodys_death_is_final(parts):
    trainer, engines, log = parts
    trainer.failures = [WeightSyncError("another tensor")]
    with pytest.raises(WeightSyncError, match="another tensor"):
        make_sync(trainer, engines, Recovery(engines)).send()
    assert log.count("update") == 1


def test_an_engine_that_dies_while_it_is_connected_ends_the_wait(parts):
    trainer, engines, log = parts
    recovery = Recovery(engines)
    trainer.checks_while_connecting = recovery.replacing = True
    with pytest.raises(WeightSyncError, match="failed while weights were sent"):
        make_sync(trainer, engines, recovery).send()
    assert "update" not in log


def test_three_tries_are_enough(parts):
    trainer, engines, log = parts
    trainer.failures = [EngineError(f"death {i}") for i in range(5)]
    with pytest.raises(EngineError, match="death 2"):
        make_sync(trainer, engines, Recovery(engines, dead=[0, 1, 0, 1])).send()
    assert log.count("update") == 3


def test_engines_with_parts_of_two_versions_go_on_only_when_no_other_try_follows(parts):
    trainer, engines, log = parts
    trainer.failures = [EngineError("first"), EngineError("second")]
    make_sync(trainer, engines, Recovery(engines, dead=[0, 1])).send()
    assert log.count("update") == 3
    assert not any(event.startswith("release") for event in log)
    trainer.failures = [EngineError("last")]
    with pytest.raises(EngineError, match="last"):
        make_sync(trainer, engines, Recovery(engines)).send()
    assert log[-1] == "release http://new http://new"


def test_engines_go_on_when_what_died_does_not_come_back(parts):
    trainer, engines, log = parts
    trainer.failures = [EngineError("gone")]

    def lost():
        raise EngineError("engine 0 did not start again")

    with pytest.raises(EngineError, match="did not start again"):
        WeightSync(trainer, engines, Recovery(engines, dead=[0]), prepare=lost, idle_seconds=1.0).send()
    assert log[-1] == "release http://a http://b"


def test_nobody_waits_for_a_dead_engine_to_take_weights(parts):
    trainer, engines, _ = parts
    recovery = Recovery(engines)
    recovery.replacing = True
    with pytest.raises(WeightSyncError, match="an engine or a router failed while weights were sent"):
        make_sync(trainer, engines, recovery).send()


def test_an_engine_on_another_version_is_an_error(parts):
    trainer, engines, _ = parts
    engines.versions = ["1", "default"]
    with pytest.raises(WeightSyncError, match=r"sync of weight version 1: http://b has default"):
        make_sync(trainer, engines, None).send()
