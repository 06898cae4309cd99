"""Several models, engines that already run, sessions and lost ports: engine groups with real processes and routers."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.ports import PortBook
from slime.cluster.process import ServerProcess, responds
from slime.cluster.ray_session import guarded_processes, ray_session
from slime.cluster.registration import Registration, deregister, register, workers
from slime.cluster.router import router_command, router_values
from slime.config import ClusterConfig, Config, DebugConfig, EngineConfig, RolloutConfig, TrainConfig
from slime.config.deployment import ModelDeployment, ServerGroup
from slime.config.external import read_external
from slime.engines.features import ask_server_info
from slime.errors import EngineError
from slime.http_control import request
from slime.observability.watchdog import wait_until
from tests.support.engine_groups import running_engines
from tests.support.engine_process import engine_process, router_process
from tests.support.gloo import free_port
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

PAYLOAD = {"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "a", "llama"), make_tiny_model(folder / "b", "qwen3")


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with guarded_processes() as guardian, ray_session("cpu", 4, guardian.scratch_dir):
        yield


def config_of(model: Path, *deployment: ModelDeployment, **sections: Any) -> Config:
    base = Config(
        cluster=ClusterConfig(device="cpu", rollout_num_gpus=sum(m.num_gpus for m in deployment)),
        train=TrainConfig(precision="fp32"),
        rollout=RolloutConfig(hf_checkpoint=str(model)),
        engine=EngineConfig(engine_start_timeout_seconds=90, rollout_backend="embedded"),
        sglang={"max_total_tokens": 4096},
        debug=DebugConfig(debug_rollout_only=True),
        deployment=deployment,
    )
    return replace(base, **sections)


def wait_for_workers(router_url: str, urls: list[str]) -> None:
    """The router takes engines out of its list some time after it was told to."""
    wait_until(
        lambda: [w["url"] for w in workers(router_url, 10)] == urls,
        waiter="the test",
        waited_for=f"the router to list {urls}",
        timeout_seconds=20,
    )


def url_of(address: tuple[str, int]) -> str:
    return f"http://{address[0]}:{address[1]}"


def test_two_models_behind_routers_of_their_own_and_sessions_that_stay(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The engines tell who they are by the weight version that their group gives them."""
    groups = [
        ServerGroup(num_gpus=1, num_gpus_per_engine=1, overrides={"weight_version": name}) for name in ("one", "two")
    ]
    actor = ModelDeployment(name="actor", server_groups=(*groups, ServerGroup(worker_type="placeholder", num_gpus=1)))
    judge = ModelDeployment(name="judge", model_path=str(models[1]), server_groups=(ServerGroup(num_gpus=1),))
    config = config_of(models[0], judge, actor, router={"policy": "consistent_hashing"})
    with running_engines(config, tmp_path) as group:
        assert list(group.router_addresses) == ["actor", "judge"]  # the default one first: it gets the weights
        assert group.router_url == url_of(group.router_addresses["actor"])
        assert [(e.name, e.model_path) for e in group.endpoints] == [
            ("engine 1", str(models[0])),
            ("engine 2", str(models[0])),
        ]
        assert group.weight_versions() == ["one", "two"]
        judge_url = url_of(group.router_addresses["judge"])
        (only,) = workers(judge_url, 10)
        assert request(f"{only['url']}/model_info", timeout_seconds=10)["model_path"] == str(models[1])
        assert len(request(f"{judge_url}/generate", PAYLOAD, timeout_seconds=30)["output_ids"]) == 2
        served = engines_of_sessions(group.router_url)
        assert [session for session, engines in served.items() if len(engines) > 1] == []
        assert set().union(*served.values()) == {"one", "two"}
        group.check()


def engines_of_sessions(router_url: str) -> dict[str, set[str]]:
    """Which engines answered the requests of each session."""
    served: dict[str, set[str]] = defaultdict(set)
    for number in range(36):
        key = f"session {number % 12}"
        headers = {"X-SMG-Routing-Key": key, "Content-Type": "application/json"}
        message = urllib.request.Request(f"{router_url}/generate", json.dumps(PAYLOAD).encode(), headers)
        with urllib.request.urlopen(message, timeout=30) as reply:
            served[key].add(json.load(reply)["meta_info"]["weight_version"])
    return served


class TakenFirst(PortBook):
    """Gives the first engine a port that another program holds."""

    def __init__(self, taken: int) -> None:
        super().__init__()
        self._taken = [taken]

    def take(self, node_id: str, widths: Any, search: Callable[[int], list[int]]) -> list[int]:
        found = super().take(node_id, widths, search)
        return [self._taken.pop(), *found[1:]] if self._taken else found


def test_an_engine_whose_port_was_taken_in_between_starts_again(models: tuple[Path, Path], tmp_path: Path) -> None:
    model = ModelDeployment(name="m", server_groups=(ServerGroup(num_gpus=1),))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with running_engines(config_of(models[0], model), tmp_path, TakenFirst(taken)) as group:
            (url,) = group.urls
            assert not url.endswith(f":{taken}")
            assert responds(f"{url}/model_info")
            assert [w["url"] for w in workers(group.router_url, 10)] == [url]
    assert "address already in use" in (tmp_path / "engine_0.log").read_text()


def test_engines_and_a_router_that_ran_before_run_on_afterwards(models: tuple[Path, Path], tmp_path: Path) -> None:
    with engine_process(models[0]) as first, engine_process(models[0]) as second, router_process([]) as router:
        engines = tuple(read_external(url, ask_server_info(url, timeout_seconds=10)) for url in (first, second))
        assert {(e.backend, e.num_gpus, e.model_path) for e in engines} == {("embedded", 1, str(models[0]))}
        ip, port = router.removeprefix("http://").split(":")
        config = config_of(
            models[0],
            external_engines=engines,
            cluster=ClusterConfig(device="cpu", rollout_num_gpus=2),
            rollout=RolloutConfig(hf_checkpoint=str(models[0]), rollout_external_engine_addrs=(first, second)),
            engine=EngineConfig(rollout_backend="embedded", sglang_router_ip=ip, sglang_router_port=int(port)),
        )
        with running_engines(config, tmp_path) as group:
            assert group.router_url == router
            assert [e.url for e in group.endpoints] == [first, second]
            assert all(e.node_id is not None and e.gpu_ids == () for e in group.endpoints)  # of this machine
            assert group.weight_versions() == ["default", "default"]
            assert {w["url"] for w in workers(router, 10)} == {first, second}
            assert len(request(f"{router}/generate", PAYLOAD, timeout_seconds=30)["output_ids"]) == 2
        assert all(responds(f"{url}/model_info") for url in (first, second))
        wait_for_workers(router, [])


@contextmanager
def product_router(log_path: Path, **values: Any) -> Iterator[str]:
    """The router process of the product, without a run around it."""
    port = free_port()
    config = Config(router={"policy": values.pop("policy", "round_robin")})
    command = router_command(router_values(config, host="127.0.0.1", port=port, prometheus_port=free_port(), **values))
    process = ServerProcess("router", command, log_path=log_path, env={})
    try:
        process.wait_ready(f"http://127.0.0.1:{port}/liveness", timeout_seconds=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


def test_what_the_router_keeps_of_an_engine(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Kinds and bootstrap ports as it lists them; keys of sessions; engines that were taken out are gone."""
    flags = ("--max-total-tokens", "4096", "--weight-version")
    with engine_process(models[0], *flags, "one") as first, engine_process(models[0], *flags, "two") as second:
        with product_router(tmp_path / "pd.log", disaggregated=True) as router:
            prefill = Registration(url=first, worker_type="prefill", bootstrap_port=9001)
            register(router, [prefill, Registration(url=second, worker_type="decode")], timeout_seconds=30)
            listed = {w["url"]: (w["worker_type"], w.get("bootstrap_port")) for w in workers(router, 10)}
            assert listed == {first: ("prefill", 9001), second: ("decode", None)}
        with product_router(tmp_path / "manual.log", policy="manual") as router:
            register(router, [Registration(url=first), Registration(url=second)], timeout_seconds=30)
            served = engines_of_sessions(router)
            assert [session for session, engines in served.items() if len(engines) > 1] == []
            assert set().union(*served.values()) == {"one", "two"}
            deregister(router, [first])
            wait_for_workers(router, [second])


def test_a_prefill_engine_needs_its_bootstrap_port() -> None:
    with pytest.raises(EngineError, match="has no bootstrap port"):
        register("http://127.0.0.1:1", [Registration(url="http://e:1", worker_type="prefill")], timeout_seconds=1)
