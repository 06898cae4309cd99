"""Weights from a trainer into engine processes: shared memory, process groups, and the proof that they arrived."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.errors import EngineError, WaitTimeoutError, WeightSyncError
from slime.weights.checksum import tensor_checksum
from tests.integration.engines.conftest import post
from tests.support.engine_process import engine_process
from tests.support.gloo import free_port
from tests.support.tiny_models import tiny_weights
from tests.support.weight_updates import (
    as_bucket,
    endpoints_of,
    let_go,
    listening_process,
    shared_memory_files,
    updater_of,
)

BODY = {"input_ids": list(range(30)), "sampling_params": {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}}


@pytest.fixture(scope="module")
def engines(model_path: Path) -> Iterator[list[str]]:
    """Two float32 engines and the weights they should hold next."""
    with (
        engine_process(model_path, "--skip-tokenizer-init") as a,
        engine_process(model_path, "--skip-tokenizer-init") as b,
    ):
        yield [a, b]


@pytest.fixture(scope="module")
def bf16_engine(model_path: Path) -> Iterator[str]:
    with engine_process(model_path, "--skip-tokenizer-init", "--dtype", "bfloat16") as url:
        yield url


def weights_of(model_path: Path, seed: int) -> dict[str, torch.Tensor]:
    return tiny_weights(json.loads((model_path / "config.json").read_text()), seed)


def held(url: str) -> dict[str, str]:
    return post(url, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]


@pytest.mark.parametrize("carrier", ["tensor", "broadcast"])
def test_every_engine_holds_what_was_sent(engines: list[str], model_path: Path, carrier: str) -> None:
    files = shared_memory_files()
    for seed, pieces in ((11, 20_000), (12, 10**9)):
        weights = weights_of(model_path, seed)
        with updater_of(engines, carrier=carrier, bucket_bytes=pieces, model=model_path) as updater:
            items = list(weights.items())
            report = updater.update(iter([items[:7], items[7:]]), version=str(seed))
        assert report.tensors == len(weights)
        assert report.verified == 2 * len(weights)
        assert report.bytes == sum(t.nbytes for t in weights.values())
        largest = max(t.nbytes for t in weights.values())
        assert largest < report.metrics["perf/update_weights_buffer_bytes"] <= max(pieces, 2 * largest)
        assert shared_memory_files() <= files
        for url in engines:
            assert held(url) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
            assert post(url, "/generate", BODY)["meta_info"]["weight_version"] == str(seed)


@pytest.mark.parametrize("carrier", ["tensor", "broadcast"])
def test_tensors_are_converted_to_the_engines_dtype(bf16_engine: str, model_path: Path, carrier: str) -> None:
    weights = weights_of(model_path, 13 + len(carrier))
    with updater_of([bf16_engine], carrier=carrier) as updater:
        report = updater.update([as_bucket(weights)], "1")
    assert report.bytes == sum(t.nbytes for t in weights.values()) // 2
    assert held(bf16_engine) == {name: tensor_checksum(tensor.bfloat16()) for name, tensor in weights.items()}


def test_another_set_of_engines_gets_a_group_of_its_own(engines: list[str], model_path: Path) -> None:
    with updater_of(engines, carrier="broadcast") as updater:
        updater.update([as_bucket(weights_of(model_path, 31))], "31")
        updater.connect(endpoints_of(engines[1:]))
        updater.update([as_bucket(weights_of(model_path, 32))], "32")
    versions = [post(url, "/generate", BODY)["meta_info"]["weight_version"] for url in engines]
    assert versions == ["31", "32"]
    for url in engines:
        reply = post(url, "/destroy_weights_update_group", {"group_name": "slime"}, expect=400)
        assert "no group" in reply["message"]


def test_running_requests_are_computed_on_with_the_new_weights(engines: list[str], model_path: Path) -> None:
    with updater_of(engines[:1]) as updater, ThreadPoolExecutor(1) as pool:
        updater.update([as_bucket(weights_of(model_path, 14))], "14")
        body = BODY | {"sampling_params": {"temperature": 0, "max_new_tokens": 1200, "ignore_eos": True}}
        running = pool.submit(post, engines[0], "/generate", body)
        while not post(engines[0], "/get_load", method="GET")[0]["num_running_reqs"]:
            pass
        updater.update([as_bucket(weights_of(model_path, 15))], "15")
        meta = running.result(60)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["14", "15"]
    assert meta["num_retractions"] == 1


def test_an_engine_that_kept_old_values_is_reported(
    engines: list[str], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(model_path, 17)
    name = "model.layers.1.self_attn.k_norm.weight"
    with updater_of(engines, model=model_path) as updater:
        updater.update([as_bucket(weights_of(model_path, 16))], "16")
        verifier = updater._verifier
        assert verifier is not None
        check = verifier.check

        def overwrite_first(version: str, *, send_seconds: float) -> Any:
            with updater_of(engines[1:]) as other:
                other.update([[(name, torch.zeros(32))]], "stale")
            return check(version, send_seconds=send_seconds)

        monkeypatch.setattr(verifier, "check", overwrite_first)
        with pytest.raises(WeightSyncError, match=rf"(?s)engine 1.*{name}"):
            updater.update([as_bucket(weights)], "17")
    let_go(engines)


@pytest.mark.parametrize("carrier", ["tensor", "broadcast"])
def test_a_tensor_that_does_not_fit_is_named_and_the_engine_lives_on(
    engines: list[str], model_path: Path, carrier: str
) -> None:
    files = shared_memory_files()
    with updater_of(engines, carrier=carrier) as updater:
        with pytest.raises(
            WeightSyncError, match=r"engine \d: .*model\.norm\.weight comes with shape \[3\]; the model has \[64\]"
        ):
            updater.update([[("model.norm.weight", torch.zeros(3))]], "bad")
        assert shared_memory_files() <= files
        let_go(engines)
        assert len(post(engines[0], "/generate", BODY)["output_ids"]) == 10
        updater.update([as_bucket(weights_of(model_path, 18))], "18")


def test_engines_that_are_not_there() -> None:
    with (
        pytest.raises(EngineError, match=r"engine 0: .*cannot be reached"),
        updater_of([f"http://127.0.0.1:{free_port()}"]),
    ):
        pass


@pytest.mark.parametrize("carrier", ["tensor", "broadcast"])
def test_a_frozen_engine_is_named_in_time_and_the_others_go_on(
    engines: list[str], model_path: Path, carrier: str
) -> None:
    """A bucket larger than the buffers of a socket, so that the broadcast cannot end without the engine."""
    files = shared_memory_files()
    frozen = listening_process(engines[1])
    large = [("model.embed_tokens.weight", torch.zeros(264, 64))] * 60
    with updater_of(engines, carrier=carrier, timeout_seconds=4) as updater:

        def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
            os.kill(frozen, signal.SIGSTOP)
            yield large

        started = time.monotonic()
        try:
            with pytest.raises(
                WaitTimeoutError, match=rf"^engine 1: the trainer waited \d s for {engines[1]}/update_w"
            ):
                updater.update(buckets(), "33")
            assert time.monotonic() - started < 4
        finally:
            os.kill(frozen, signal.SIGCONT)
        let_go(engines)
        assert len(post(engines[0], "/generate", BODY)["output_ids"]) == 10
    assert shared_memory_files() <= files
    weights = weights_of(model_path, 34)
    with updater_of(engines, carrier=carrier) as updater:  # the one that wakes can be updated as the others
        updater.update([as_bucket(weights)], "34")
    for url in engines:
        assert held(url) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
        assert post(url, "/generate", BODY)["meta_info"]["weight_version"] == "34"


TRAINER = """
import json, sys
import torch, torch.distributed as dist
from slime.weights.groups import join_group, leave_group
from tests.support.tiny_models import tiny_weights
from tests.support.weight_updates import as_bucket, endpoints_of, listening_process, shared_memory_files, updater_of
port, config, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
group = join_group(master_address="127.0.0.1", master_port=port, rank=0, world_size=3, name="g", backend="gloo",
                   timeout_seconds=60)
for line in sys.stdin:  # one broadcast round per line
    for tensor in tiny_weights(json.load(open(config)), seed).values():
        dist.broadcast(tensor, src=0, group=group)
    print("sent", flush=True)
leave_group(group)
"""


@pytest.mark.timeout(120)
def test_weights_over_a_process_group(engines: list[str], model_path: Path) -> None:
    port, seed = free_port(), 19
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(port), str(model_path / "config.json"), str(seed)]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert trainer.stdin is not None
    weights = weights_of(model_path, seed)
    group = {"master_address": "127.0.0.1", "master_port": port, "world_size": 3, "group_name": "g", "backend": "gloo"}
    message = {
        "names": list(weights),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
        "shapes": [list(t.shape) for t in weights.values()],
        "group_name": "g",
        "weight_version": "19",
    }
    try:
        with ThreadPoolExecutor(2) as pool:

            def both(path: str, bodies: list[dict[str, Any]], expect: int = 200) -> list[Any]:
                futures = [pool.submit(post, u, path, b, expect=expect) for u, b in zip(engines, bodies, strict=True)]
                return [future.result(60) for future in futures]

            both("/init_weights_update_group", [group | {"rank_offset": i} for i in (1, 2)])
            both("/begin_weight_update", [{}] * 2)
            trainer.stdin.write("go\n")
            trainer.stdin.flush()
            both("/update_weights_from_distributed", [message] * 2)
            # A tensor that does not fit is received all the same, so that the trainer is not left hanging.
            trainer.stdin.write("go\n")
            trainer.stdin.flush()
            wrong = message | {"names": ["model.nothing", *list(weights)[1:]]}
            replies = both("/update_weights_from_distributed", [wrong] * 2, expect=400)
            assert all("no tensor 'model.nothing'" in reply["message"] for reply in replies)
            both("/end_weight_update", [{}] * 2)
            for url in engines:
                assert held(url) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
                assert post(url, "/generate", BODY)["meta_info"]["weight_version"] == "19"
            unknown = post(engines[0], "/update_weights_from_distributed", message | {"group_name": "h"}, expect=400)
            assert "no group 'h'" in unknown["error"]["message"]
            trainer.stdin.close()
            both("/destroy_weights_update_group", [{"group_name": "g"}] * 2)
        assert trainer.wait(30) == 0
    finally:
        trainer.kill()
        trainer.wait(10)
