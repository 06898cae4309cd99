"""New weights by every way, on both engines: values, versions, and requests that run meanwhile.

The sending side is written here anew, from what the wire says: the product's own senders have tests of their own.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file

from slime.weights.groups import join_group
from tests.conformance.targets import PROMPT, TOLERANCE, Reference, Stream, Target, log_probs_of
from tests.support.gloo import free_port

pytestmark = pytest.mark.usefixtures("restored")
FREE = {"max_new_tokens": 12, "ignore_eos": True}


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


@contextmanager
def paused(target: Target, mode: str = "retract") -> Iterator[None]:
    target.post("/pause_generation", {"mode": mode})
    try:
        yield
    finally:
        target.post("/continue_generation")


def send_tensors(target: Target, tensors: dict[str, torch.Tensor], version: str, **more: Any) -> None:
    """Give tensors in shared memory, named by file as processes that are no relatives need it."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        shared = [(name, tensor.clone().share_memory_()) for name, tensor in tensors.items()]
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(shared)
        payload = base64.b64encode(buffer.getvalue()).decode()
        body = {"serialized_named_tensors": [payload], "weight_version": version, **more}
        assert target.post("/update_weights_from_tensor", body)["success"] is True
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def update(target: Target, tensors: dict[str, torch.Tensor], version: str) -> None:
    assert target.post("/begin_weight_update")["success"] is True
    send_tensors(target, tensors, version)
    assert target.post("/end_weight_update")["success"] is True


def check_holds(target: Target, reference: Reference, version: str) -> None:
    reply = target.generate(input_ids=PROMPT, sampling_params=FREE, return_logprob=True)
    assert reply["meta_info"]["weight_version"] == version
    assert reply["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 12}]
    assert log_probs_of(reply) == pytest.approx(reference.log_probs(PROMPT, reply["output_ids"]), abs=TOLERANCE)
    assert target.get("/model_info")["weight_version"] == version


def test_from_disk(direct: Target, other_model: Path, other_reference: Reference) -> None:
    body = {"model_path": str(other_model), "weight_version": "disk-1"}
    assert direct.post("/update_weights_from_disk", body)["success"] is True
    check_holds(direct, other_reference, "disk-1")


def test_from_disk_that_has_nothing(direct: Target, reference: Reference, tmp_path: Path) -> None:
    reply = direct.post("/update_weights_from_disk", {"model_path": str(tmp_path / "none")}, expect=400)
    assert reply["success"] is False
    check_holds(direct, reference, "default")


def test_from_tensors(direct: Target, other_model: Path, other_reference: Reference) -> None:
    with paused(direct):
        update(direct, weights_of(other_model), "tensor-1")
    check_holds(direct, other_reference, "tensor-1")


def test_from_tensors_in_parts(direct: Target, other_model: Path, other_reference: Reference) -> None:
    items = list(weights_of(other_model).items())
    with paused(direct):
        direct.post("/begin_weight_update")
        for part in (items[::2], items[1::2]):
            send_tensors(direct, dict(part), "tensor-2")
        direct.post("/end_weight_update")
    check_holds(direct, other_reference, "tensor-2")


def test_tensors_belong_between_begin_and_end(direct: Target, reference: Reference) -> None:
    body = {"serialized_named_tensors": [""], "weight_version": "never"}
    reply = direct.post("/update_weights_from_tensor", body, expect=400)
    assert "begin_weight_update" in str(reply)
    assert direct.post("/begin_weight_update")["success"] is True
    assert direct.post("/begin_weight_update", expect=400)["success"] is False
    assert direct.post("/end_weight_update")["success"] is True
    check_holds(direct, reference, "default")


def test_from_a_process_group(direct: Target, other_model: Path, other_reference: Reference) -> None:
    tensors = weights_of(other_model)
    port, name = free_port(), f"conformance-{direct.kind}"
    place = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "backend": "gloo"}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(direct.post, "/init_weights_update_group", {**place, "rank_offset": 1, "group_name": name})
        group = join_group(rank=0, name=name, timeout_seconds=60, **place)
        assert joined.result(60)["success"] is True
        with paused(direct):
            direct.post("/begin_weight_update")
            body = {
                "names": list(tensors),
                "dtypes": ["float32"] * len(tensors),
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
                "group_name": name,
                "weight_version": "group-1",
            }
            received = pool.submit(direct.post, "/update_weights_from_distributed", body)
            for tensor in tensors.values():
                dist.broadcast(tensor, src=0, group=group)
            assert received.result(60)["success"] is True
            direct.post("/end_weight_update")
        assert direct.post("/destroy_weights_update_group", {"group_name": name})["success"] is True
    dist.destroy_process_group(group)
    check_holds(direct, other_reference, "group-1")


def test_running_request_goes_on_with_the_new_weights(
    target: Target, other_model: Path, reference: Reference, other_reference: Reference
) -> None:
    sampling = {"max_new_tokens": 300, "ignore_eos": True}
    stream = Stream(target, {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
    stream.wait_tokens(20)
    with paused(target, "retract"):
        target.post("/flush_cache")
        update(target, weights_of(other_model), "later")
    last = stream.result(30)
    spans = last["meta_info"]["weight_versions"]
    changed = spans[0]["end"]
    assert spans == [
        {"version": "default", "start": 0, "end": changed},
        {"version": "later", "start": changed, "end": 300},
    ]
    assert 20 <= changed < 300
    expected = reference.log_probs(PROMPT, last["output_ids"][:changed])
    expected += other_reference.log_probs([*PROMPT, *last["output_ids"][:changed]], last["output_ids"][changed:])
    assert log_probs_of(last) == pytest.approx(expected, abs=TOLERANCE)


def test_checksums_follow_the_values(direct: Target, other_model: Path) -> None:
    def checksums() -> dict[str, str]:
        reply = direct.post("/weights_checker", {"action": "checksum"})
        assert reply["success"] is True
        return reply["ranks"][0]["checksums"]

    before = checksums()
    tensors = weights_of(direct.model_path)
    with paused(direct):
        update(direct, tensors, "the-same")
    assert checksums() == before
    changed = tensors["model.norm.weight"].clone()
    changed[5] += 2**-20
    with paused(direct):
        update(direct, {"model.norm.weight": changed}, "a-bit-different")
    after = checksums()
    assert {name for name in before if after[name] != before[name]} == {"model.norm.weight"}


def test_version_can_be_renamed(direct: Target, reference: Reference) -> None:
    body = {"new_version": "renamed", "abort_all_requests": False}
    assert direct.post("/update_weight_version", body)["new_version"] == "renamed"
    check_holds(direct, reference, "renamed")
