"""Weights of a trainer split in every way, brought to engines in every way: each engine then holds the checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.config import Config
from slime.engines.embedded.payload import read_shared_tensors
from slime.errors import SlimeError
from slime.weights.checksum import tensor_checksum
from slime.weights.control import Deadline
from slime.weights.streamed import StreamedUpdater, StreamSettings
from slime.weights.team import RankTeam
from slime.weights.transport import TensorChannel
from tests.integration.engines.conftest import post
from tests.support.engine_process import engine_process
from tests.support.fake_control import ControlRecorder
from tests.support.gloo import Rank, run_ranks
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.training import make_config
from tests.support.weight_updates import endpoints_of, let_go, shared_memory_files
from tests.support.workers import running_worker

pytestmark = pytest.mark.timeout(200)

CARRIERS = ("nccl", "broadcast")


def sync_by_every_carrier(rank: Rank, config: Config, urls: list[str]) -> tuple[dict[str, str], list[Any]]:
    """What a rank gets when all receive, and what the engines hold after each carrier."""
    from slime.backends.megatron.export import iter_hf_buckets

    held: list[Any] = []
    with running_worker(config, rank) as worker:
        buckets = iter_hf_buckets(worker.chunks, config, 30_000, "all")
        received = {name: tensor_checksum(tensor) for bucket in buckets for name, tensor in bucket}
        for carrier in CARRIERS:
            if worker._updater is not None:
                worker._updater.close()
            worker._updater = None
            worker.config = replace(config, weights=replace(config.weights, update_weight_transport=carrier))
            worker.connect_engines(endpoints_of(urls))
            metrics = worker.update_weights()
            if rank.rank == 0:
                assert metrics["perf/update_weights_buffer_bytes"] > 0
                held += [post(url, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"] for url in urls]
                for url in urls:
                    post(url, "/weights_checker", {"action": "reset_tensors"})
    return received, held


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A model, and two engines that hold another."""
    folder = tmp_path_factory.mktemp("dense")
    model, other = make_tiny_model(folder / "model", "qwen3"), make_tiny_model(folder / "other", "qwen3", seed=5)
    with engine_process(other, "--skip-tokenizer-init") as a, engine_process(other, "--skip-tokenizer-init") as b:
        yield model, [a, b]


def check_layout(model: Path, urls: list[str], argv: tuple[str, ...]) -> None:
    expected = {name: tensor_checksum(tensor) for name, tensor in load_file(model / "model.safetensors").items()}
    files = shared_memory_files()
    weights = {"update_weight_buffer_size": 30_000}
    config = make_config(model, argv, num_processes=2, weights=weights)
    results = run_ranks(2, sync_by_every_carrier, config, urls, timeout_seconds=120)
    for received, _ in results:
        assert received == expected
    assert results[0][1] == [expected] * (len(CARRIERS) * len(urls))
    assert shared_memory_files() <= files


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
def test_a_split_model_arrives_whole_in_two_engines(dense: tuple[Path, list[str]], flag: str) -> None:
    check_layout(*dense, (flag, "2"))


def test_experts_of_two_ranks_arrive(tmp_path: Path) -> None:
    family: Family = "qwen3_moe"
    model, other = make_tiny_model(tmp_path / "model", family), make_tiny_model(tmp_path / "other", family, seed=5)
    with engine_process(other, "--skip-tokenizer-init") as url:
        check_layout(model, [url], ("--expert-model-parallel-size", "2"))


def update_with_a_frozen_rank(rank: Rank, url: str, timeout_seconds: float) -> tuple[str, float, str]:
    """Rank 1 stops itself inside the update; rank 0 sees what that looks like, then wakes it."""
    store = dist.TCPStore("127.0.0.1", rank.port, 2, is_master=rank.rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=2)
    store.set(f"pid {rank.rank}", str(os.getpid()))
    settings = StreamSettings(
        is_cuda=False,
        shares_memory=True,
        timeout_seconds=timeout_seconds,
        bucket_bytes=10**9,
        pause_mode=lambda endpoints: "retract",
    )
    updater = StreamedUpdater(settings, rank=rank.rank, world_size=2)
    updater.connect(endpoints_of([url]))

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        yield []

    started = time.monotonic()
    try:
        updater.update(buckets(), "1")
    except SlimeError as error:
        seconds, message = time.monotonic() - started, str(error)
    else:
        seconds, message = 0.0, "no error"
    after = ""
    if rank.rank == 0:
        let_go([url])  # the driver's part: the update itself leaves engines paused
        reply = post(url, "/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}})
        after = reply["meta_info"]["finish_reason"]["type"]
        os.kill(int(store.get("pid 1")), signal.SIGCONT)
    return message, seconds, after


def test_a_frozen_rank_is_named_in_time_and_the_engine_goes_on(dense: tuple[Path, list[str]]) -> None:
    results = run_ranks(2, update_with_a_frozen_rank, dense[1][0], 3.0, timeout_seconds=60)
    message, seconds, after = results[0]
    assert "trainer rank 0 waited" in message
    assert "to send the weights" in message
    assert "Ranks 1 failed to pass" in message
    assert seconds < 3.0
    assert after == "length"


def send_from_both_ranks(rank: Rank, url: str) -> str:
    """Two ranks that share one engine of two processes, as on two GPUs; one note of each is posted."""
    store = dist.TCPStore("127.0.0.1", rank.port, 2, is_master=rank.rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=2)
    deadline = Deadline(20)
    team: RankTeam[list[str] | str] = RankTeam((0, 1), rank=rank.rank, deadline=deadline)
    channel = TensorChannel(endpoints_of([url]), [2], team=team, deadline=deadline)
    channel.begin()
    outcome = ""
    try:
        for step in range(3):
            channel.start([("a", torch.full((4, 3), float(10 * step + rank.rank)))], "7")
        channel.finish()
        assert channel.peak_bytes == 2 * 48
    except SlimeError as error:
        outcome = str(error)
    assert channel.held_bytes == 0
    channel.close()
    return outcome


def test_ranks_that_share_an_engine_hand_in_one_note_each() -> None:
    seen: list[list[float]] = []
    files = shared_memory_files()

    def take(path: str, body: Any) -> int:
        assert body["load_format"] == "flattened_bucket"
        assert body["weight_version"] == "7"
        assert body["flush_cache"] is False
        notes = body["serialized_named_tensors"]
        seen.append([read_shared_tensors([note], body["load_format"])[0][1][3, 2].item() for note in notes])
        return 200

    with ControlRecorder(take) as engine:
        assert run_ranks(2, send_from_both_ranks, engine.url, timeout_seconds=60) == ["", ""]
    assert seen == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    assert shared_memory_files() <= files


def test_a_refusal_reaches_every_rank_of_the_engine() -> None:
    files = shared_memory_files()

    def refuse(path: str, body: Any) -> int:
        for note in body["serialized_named_tensors"]:
            read_shared_tensors([note], body["load_format"])
        return 400

    with ControlRecorder(refuse) as engine:
        first, second = run_ranks(2, send_from_both_ranks, engine.url, timeout_seconds=60)
    assert first.startswith("version 7, tensors a to a: engine 0: ")
    assert second == f"another rank could not send: {first}"
    assert len(engine.asked) == 1
    assert shared_memory_files() <= files
