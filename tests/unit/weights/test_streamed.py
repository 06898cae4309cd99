"""Which engines are reached how, and what is refused before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slime.config import ClusterConfig, Config, WeightsConfig
from slime.config.hf import HfModel
from slime.engines.embedded.payload import read_shared_tensors
from slime.errors import EngineError, WeightSyncError
from slime.weights.endpoint import EngineEndpoint
from slime.weights.streamed import StreamedUpdater, StreamSettings
from slime.weights.updater import TrainerRank, build_updater
from tests.support.fake_control import ControlRecorder
from tests.support.gloo import free_port
from tests.support.weight_updates import endpoints_of, updater_of

CUDA = StreamSettings(
    is_cuda=True, shares_memory=True, timeout_seconds=5.0, bucket_bytes=1000, pause_mode=lambda endpoints: "retract"
)


@pytest.mark.parametrize(
    ("cluster", "transport", "shares_memory"),
    [
        ({"device": "cuda", "colocate": True}, "nccl", True),
        ({"device": "cuda", "colocate": False}, "nccl", False),
        ({"device": "cpu", "colocate": False}, "nccl", True),
        ({"device": "cpu", "colocate": True}, "broadcast", False),
        ({"device": "cpu", "colocate": False}, "broadcast", False),
    ],
)
def test_the_table_of_ways(cluster: dict[str, Any], transport: Any, shares_memory: bool) -> None:
    weights = WeightsConfig(update_weight_transport=transport, update_weight_buffer_size=77)
    hf = HfModel(path="model", config={"model_type": "qwen3"}, model_type="qwen3")
    config = Config(cluster=ClusterConfig(**cluster), weights=weights, hf=hf)
    updater = build_updater(config, TrainerRank(rank=0, world_size=1))
    assert isinstance(updater, StreamedUpdater)
    settings = updater._settings
    assert (settings.shares_memory, settings.is_cuda) == (shares_memory, cluster["device"] == "cuda")
    assert settings.bucket_bytes == 77


def test_without_engines_there_is_nothing_to_connect() -> None:
    with updater_of([]) as updater:
        assert updater.receivers == "first"


def connected(settings: StreamSettings, endpoint: EngineEndpoint) -> StreamedUpdater:
    updater = StreamedUpdater(settings, rank=0, world_size=1)
    updater.connect([endpoint])
    return updater


def test_pipeline_stages_of_an_engine_are_refused() -> None:
    with ControlRecorder(info={"pp_size": 2, "tp_size": 2, "version": "0.5.23"}) as engine:
        (endpoint,) = endpoints_of([engine.url], backend="sglang")
        with pytest.raises(WeightSyncError, match=r"engine 0 is split into 2 pipeline stages.*transport disk"):
            connected(replace(CUDA, is_cuda=False), endpoint)


def test_an_engine_whose_gpus_have_no_rank_each_is_refused() -> None:
    with ControlRecorder(info={"tp_size": 4, "version": "0.5.23"}) as engine:
        (endpoint,) = endpoints_of([engine.url], backend="sglang", trainer_ranks=(0, 1))
        with pytest.raises(WeightSyncError, match="engine 0 has 4 tensor-parallel processes, 2 of its GPUs have a"):
            connected(CUDA, endpoint)


def test_an_engine_on_the_gpu_of_another_rank_makes_every_rank_receive() -> None:
    for ranks, receivers in (((0,), "first"), ((1,), "all")):
        with ControlRecorder(info={"tp_size": 1, "version": "0.5.23"}) as engine:
            (endpoint,) = endpoints_of([engine.url], backend="sglang", trainer_ranks=ranks)
            updater = connected(CUDA, endpoint)
            assert updater.receivers == receivers
            assert len(updater._channels) == (receivers == "first"), "of rank 0"
            updater.close()
            assert updater.receivers == "first"


def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match=r"engine 0: .*cannot be reached"):
        connected(CUDA, endpoints_of([f"http://127.0.0.1:{free_port()}"])[0])


def test_three_engines_read_one_piece_of_memory() -> None:
    """The memory is freed with its last reader, not under the third."""
    seen: list[list[str]] = []

    def read(path: str, body: Any) -> int:
        if path == "/update_weights_from_tensor":
            (note,) = body["serialized_named_tensors"]
            seen.append([f"{name} {t.sum():g}" for name, t in read_shared_tensors([note], body["load_format"])])
        return 200

    info = {"engine": "embedded", "dtype": "float32"}
    with ControlRecorder(read, info) as a, ControlRecorder(read, info) as b, ControlRecorder(read, info) as c:
        with updater_of([a.url, b.url, c.url], bucket_bytes=64) as updater:
            report = updater.update([[("x", torch.ones(5)), ("y", torch.ones(7).bfloat16())]], "3")
        assert a.bodies["/update_weights_from_tensor"]["weight_version"] == "3"
    assert seen == [["x 5"]] * 3 + [["y 7"]] * 3
    assert report.bytes == 20 + 28
