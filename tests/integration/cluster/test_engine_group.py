import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from slime.cluster.engines import EngineGroup
from slime.cluster.placement import Placement
from slime.cluster.process import responds
from slime.cluster.ray_session import guarded_processes, ray_session
from slime.config import ClusterConfig, Config, DebugConfig, EngineConfig, RolloutConfig, TrainConfig
from slime.errors import EngineError
from slime.http_control import request
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def session():
    with guarded_processes() as guardian, ray_session("cpu", 2, guardian.scratch_dir):
        yield


def make_group(model, log_dir, *, num_engines, **sglang):
    config = Config(
        cluster=ClusterConfig(device="cpu", rollout_num_gpus=num_engines),
        train=TrainConfig(precision="fp32"),
        rollout=RolloutConfig(hf_checkpoint=str(model)),
        engine=EngineConfig(engine_start_timeout_seconds=90, rollout_backend="embedded"),
        sglang=sglang,
        debug=DebugConfig(debug_rollout_only=True),
    )
    placement = Placement(config.layout, device="cpu", timeout_seconds=30)
    return EngineGroup(config, placement, log_dir), placement


def process_that_listens(url):
    port = url.rpartition(":")[2].encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"--port" in words and words[words.index(b"--port") + 1] == port:
                return int(folder.name)
    raise AssertionError(f"no process for {url}")


def test_two_engines_behind_the_router(session, model, tmp_path):
    group, placement = make_group(model, tmp_path, num_engines=2)
    try:
        group.start_router()
        group.launch()
        group.wait_ready()
        group.check()
        workers = request(f"{group.router_url}/workers", timeout_seconds=10)["workers"]
        assert {w["url"] for w in workers} == set(group.urls)
        assert len(group.urls) == 2
        payload = {"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        for _ in range(4):
            reply = request(f"{group.router_url}/generate", payload, timeout_seconds=30)
            assert len(reply["output_ids"]) == 3
        assert group.weight_versions() == ["default", "default"]
        group.release_memory(["kv_cache"])
        group.resume_memory(["kv_cache"])
        assert len(request(f"{group.router_url}/generate", payload, timeout_seconds=30)["output_ids"]) == 3

        os.kill(process_that_listens(group.urls[1]), signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(EngineError, match=r"(?s)engine 1.* died \(signal SIGKILL\)"):
            group.check()
    finally:
        urls = [*group.urls, group.router_url]
        group.close()
        group.close()
        placement.close()
    assert not any(responds(f"{url}/health", 1) for url in urls)


def test_an_engine_that_cannot_start_says_why(session, model, tmp_path):
    group, placement = make_group(model, tmp_path, num_engines=1, context_length=-5)
    try:
        group.start_router()
        group.launch()
        with pytest.raises(EngineError, match=r"(?s)engine 0.* died.*context-length"):
            group.wait_ready()
    finally:
        group.close()
        placement.close()
