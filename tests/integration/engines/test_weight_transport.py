"""Weights from a trainer into engine processes: shared memory, process groups, and the proof that they arrived."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.errors import EngineError, WaitTimeoutError, WeightSyncError
from slime.weights.checksum import tensor_checksum
from slime.weights.transport import TensorTransport
from tests.integration.engines.conftest import post
from tests.support.engine_process import engine_process
from tests.support.gloo import free_port
from tests.support.tiny_models import tiny_weights

BODY = {"input_ids": list(range(30)), "sampling_params": {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}}


@pytest.fixture(scope="module")
def engines(model_path: Path) -> Iterator[list[str]]:
    """Two float32 engines and the weights they should hold next."""
    with (
        engine_process(model_path, "--skip-tokenizer-init") as a,
        engine_process(model_path, "--skip-tokenizer-init") as b,
    ):
        yield [a, b]


def weights_of(model_path: Path, seed: int) -> dict[str, torch.Tensor]:
    return tiny_weights(json.loads((model_path / "config.json").read_text()), seed)


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def held(url: str) -> dict[str, str]:
    return post(url, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]


def test_every_engine_holds_what_was_sent(engines: list[str], model_path: Path) -> None:
    files = shared_files()
    for seed, pieces in ((11, 10_000), (12, 10**9)):
        weights = weights_of(model_path, seed)
        transport = TensorTransport(engines, timeout_seconds=60, bucket_bytes=pieces)
        items = list(weights.items())
        report = transport.update(iter([items[:7], items[7:]]), version=str(seed))
        assert report.tensors == len(weights)
        assert report.verified == 2 * len(weights)
        assert report.bytes == sum(t.nbytes for t in weights.values())
        assert shared_files() == files
        for url in engines:
            assert held(url) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
            assert post(url, "/generate", BODY)["meta_info"]["weight_version"] == str(seed)


def test_tensors_are_converted_to_the_engines_dtype(model_path: Path) -> None:
    weights = weights_of(model_path, 13)
    with engine_process(model_path, "--skip-tokenizer-init", "--dtype", "bfloat16") as url:
        report = TensorTransport([url], timeout_seconds=60, bucket_bytes=10**9).update([list(weights.items())], "1")
        assert report.bytes == sum(t.nbytes for t in weights.values()) // 2
        assert held(url) == {name: tensor_checksum(tensor.bfloat16()) for name, tensor in weights.items()}


def test_running_requests_are_computed_on_with_the_new_weights(engines: list[str], model_path: Path) -> None:
    transport = TensorTransport(engines[:1], timeout_seconds=60, bucket_bytes=10**9)
    transport.update([list(weights_of(model_path, 14).items())], "14")
    body = BODY | {"sampling_params": {"temperature": 0, "max_new_tokens": 1200, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, engines[0], "/generate", body)
        while not post(engines[0], "/get_load", method="GET")[0]["num_running_reqs"]:
            pass
        transport.update([list(weights_of(model_path, 15).items())], "15")
        meta = running.result(60)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["14", "15"]
    assert meta["num_retractions"] == 1


def test_an_engine_that_kept_old_values_is_reported(
    engines: list[str], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = TensorTransport(engines, timeout_seconds=60, bucket_bytes=10**9)
    transport.update([list(weights_of(model_path, 16).items())], "16")
    weights = weights_of(model_path, 17)
    name = "model.layers.1.self_attn.k_norm.weight"
    compare = transport._compare

    def overwrite_first(sent: Any, version: str) -> int:
        stale = TensorTransport(engines[1:], timeout_seconds=60, bucket_bytes=10**9, verify=False)
        stale.update([[(name, torch.zeros(32))]], "stale")
        return compare(sent, version)

    monkeypatch.setattr(transport, "_compare", overwrite_first)
    with pytest.raises(WeightSyncError, match=rf"{engines[1]} holds other values than version 17 for 1 of 25.*{name}"):
        transport.update([list(weights.items())], "17")


def test_a_tensor_that_does_not_fit_is_named_and_the_engine_lives_on(engines: list[str], model_path: Path) -> None:
    transport = TensorTransport(engines, timeout_seconds=60, bucket_bytes=10**9)
    files = shared_files()
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight comes with shape \[3\]; the model has \[64\]"):
        transport.update([[("model.norm.weight", torch.zeros(3))]], "bad")
    assert shared_files() == files
    assert len(post(engines[0], "/generate", BODY)["output_ids"]) == 10
    transport.update([list(weights_of(model_path, 18).items())], "18")


def test_engines_that_are_not_there() -> None:
    transport = TensorTransport([f"http://127.0.0.1:{free_port()}"], timeout_seconds=5, bucket_bytes=1)
    with pytest.raises(EngineError, match="cannot be reached"):
        transport.update([], "1")
    with pytest.raises(EngineError, match="no engine"):
        TensorTransport([], timeout_seconds=5, bucket_bytes=1)


def test_a_silent_engine_costs_the_stated_time() -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(WaitTimeoutError, match=r"waited 1 s for .*server_info"):
            TensorTransport([url], timeout_seconds=1, bucket_bytes=1).update([], "1")


TRAINER = """
import json, sys
import torch, torch.distributed as dist
from slime.weights.groups import join_group, leave_group
from tests.support.tiny_models import tiny_weights
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
