"""Who is replaced, who is forgiven, and what a new engine holds, on servers that die when told to."""

from types import SimpleNamespace

import pytest

from slime.cluster import recovery as recovery_module
from slime.cluster.recovery import MAX_DEATHS_IN_A_ROW, Recovery
from slime.config import ClusterConfig, Config
from slime.errors import EngineError


class Server:
    planned = SimpleNamespace(model="m", worker_type="regular", updatable=True, offloaded=True)
    registration = None

    def __init__(self, name):
        self.name, self.url = name, f"http://{name}"
        self.health_url = self.alive_url = f"{self.url}/health"
        self.processes = [SimpleNamespace(name=name, log_path=f"{name}.log")]


class Engine(Server):
    pass


class Router(Server):
    is_ours = True


class AtOnce:
    """A replacement that is over when it begins."""

    is_done, error = True, None

    def __init__(self, server, *, prepare, finish, timeout_seconds):
        self.server = server
        finish()

    def cancel(self, timeout_seconds):
        pass


@pytest.fixture
def asked():
    return []


@pytest.fixture
def dead():
    """Names of servers that the next look finds dead."""
    return []


@pytest.fixture
def recovery(monkeypatch, asked, dead):
    def failures(processes):
        names, dead[:] = list(dead), []
        return {process.name: EngineError(f"{process.name} died") for process in processes if process.name in names}

    def request(url, body, *, timeout_seconds):
        asked.append((url, body))

    monkeypatch.setattr(recovery_module, "failures", failures)
    monkeypatch.setattr(recovery_module, "Replacement", AtOnce)
    monkeypatch.setattr(recovery_module.http_control, "request", request)
    monkeypatch.setattr(recovery_module, "register", lambda *args, **options: None)
    monkeypatch.setattr(recovery_module, "RouterServer", Router)
    monkeypatch.setattr(recovery_module, "EngineServer", Engine)
    group = SimpleNamespace(servers=[Engine("a"), Engine("b")], routers={"m": Router("router")})
    config = Config(cluster=ClusterConfig(use_fault_tolerance=True, rollout_health_check_interval=60.0))
    made = Recovery(config, group, dict, weights_wait=True)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["a", "router"])
def test_a_server_that_served_a_whole_rollout_is_forgiven_its_deaths(recovery, dead, name):
    for _ in range(MAX_DEATHS_IN_A_ROW + 2):
        dead.append(name)
        recovery.settle()
        recovery.serve()
        assert recovery.rollout_complete() == {"rollout/engine_restarts": 1.0}


@pytest.mark.parametrize("name", ["a", "router"])
def test_a_server_that_never_serves_a_whole_rollout_ends_the_run(recovery, dead, name):
    for _ in range(MAX_DEATHS_IN_A_ROW):
        dead.append(name)
        recovery.settle()
    dead.append(name)
    with pytest.raises(EngineError, match=f"{name} failed 4 times without serving a whole rollout"):
        recovery.settle()


@pytest.mark.parametrize("tags", [("kv_cache", "cuda_graph"), ("weights", "kv_cache", "cuda_graph")])
def test_a_new_engine_gives_away_what_the_others_have_given_away_by_then(recovery, dead, asked, tags):
    released = ["weights"]
    recovery.match_memory(lambda: released)
    released[:] = tags
    dead.append("b")
    recovery.settle()
    body = {"tags": list(tags)}
    assert asked == [("http://b/flush_cache", {}), ("http://b/release_memory_occupation", body)]


def test_a_new_engine_keeps_its_memory_when_the_others_have_theirs(recovery, dead, asked):
    recovery.match_memory(tuple)
    dead.append("b")
    recovery.settle()
    assert asked == []
