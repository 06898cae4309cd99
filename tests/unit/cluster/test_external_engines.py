"""Engines that outlive the run: none of them stays paused."""

from types import SimpleNamespace

import pytest

from slime.cluster import engines as engines_module
from slime.cluster import waits
from slime.cluster.engines import EngineGroup
from slime.config import ClusterConfig, Config, EngineConfig, RolloutConfig
from slime.config.external import ExternalEngine
from slime.engines import api
from slime.weights.endpoint import EngineEndpoint
from tests.support.fake_control import ControlRecorder


@pytest.fixture
def engine():
    with ControlRecorder() as recorder:
        yield recorder


@pytest.fixture
def group(engine, monkeypatch, tmp_path):
    endpoint = EngineEndpoint(url=engine.url, name="external engine 0", backend="embedded")
    monkeypatch.setattr(engines_module, "external_endpoints", lambda config: (endpoint,))
    monkeypatch.setattr(engines_module.ray, "nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(engines_module, "deregister", lambda router, urls: None)
    monkeypatch.setattr(waits, "on_this_node", dict)
    known = ExternalEngine(url=engine.url, backend="embedded", num_gpus=1, worker_type="regular", model_path="m")
    config = Config(
        cluster=ClusterConfig(device="cpu"),
        rollout=RolloutConfig(hf_checkpoint="m", rollout_external_engine_addrs=(engine.url,)),
        engine=EngineConfig(sglang_router_ip="127.0.0.1", sglang_router_port=9),
        external_engines=(known,),
    )
    return EngineGroup(config, SimpleNamespace(slots=[]), tmp_path)


def test_external_engines_go_on_after_an_interrupted_update(group, engine):
    with pytest.raises(KeyboardInterrupt), group.getting_weights():
        raise KeyboardInterrupt
    assert engine.asked == []  # the trainer may still be at work
    group.close()
    assert engine.asked == [api.END_WEIGHT_UPDATE, api.CONTINUE_GENERATION]


def test_external_engines_are_left_alone_when_nothing_was_interrupted(group, engine):
    with group.getting_weights():
        pass
    group.close()
    assert engine.asked == []
