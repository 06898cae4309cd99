"""Weights under their names: loading, replacing, freeing, summing up, and reading them from another process."""

import base64
import io
import json
import pickle
import random
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.engines.api import RequestError
from slime.engines.embedded.model import Decoder
from slime.engines.embedded.payload import read_shared_tensors
from slime.engines.embedded.shape import read_shape
from slime.errors import ConfigError
from slime.weights.checksum import tensor_checksum
from slime.weights.flat import FlatBucket, sharing_by_name
from tests.support.tiny_models import Family, make_tiny_model, tiny_weights

# Large enough for packed layouts, and with biases, norms and rows that are no multiples of anything.
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3")
BIG = {"hidden_size": 288, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 300}


def build(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(read_shape(path), dtype=dtype, device=torch.device("cpu"))
    model.weights.load(path)
    return model


BIG_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"moe_intermediate_size": 260, "shared_expert_intermediate_size": 270},
    "qwen3_moe": {"moe_intermediate_size": 260},
    "glm4_moe": {"moe_intermediate_size": 260},
    "deepseek_v3": {"moe_intermediate_size": 260, "q_lora_rank": 240, "num_key_value_heads": 6},
}


def big_model(path: Path, family: Family) -> Path:
    sizes: dict[str, Any] = BIG | BIG_OF_FAMILY.get(family, {})
    return make_tiny_model(path, family, **sizes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_reads_back_bit_for_bit(family: Family, dtype: torch.dtype, tmp_path: Path) -> None:
    path = big_model(tmp_path, family)
    model = build(path, dtype)
    stored = load_file(path / "model.safetensors")
    assert set(model.weights.slots) == set(stored)
    expected: dict[str, str] = {}
    for name, tensor in stored.items():
        is_exact = name.endswith("e_score_correction_bias")
        held = tensor.float() if is_exact else tensor.to(dtype)
        assert torch.equal(model.weights.read(name), held), name
        expected[name] = tensor_checksum(held)
    assert model.weights.checksums() == expected
    assert any(not slot.home.is_plain for slot in model.weights.slots.values())


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("bucket", [1, 3, 1000])
def test_buckets_of_any_size_bring_new_weights(family: Family, bucket: int, tmp_path: Path) -> None:
    model, new = build(big_model(tmp_path / "old", family)), tmp_path / "new"
    big_model(new, family)
    config = json.loads((new / "config.json").read_text())
    tensors = list(tiny_weights(config, seed=1).items())
    random.Random(bucket).shuffle(tensors)
    sent = {name: tensor_checksum(tensor) for name, tensor in tensors}
    for start in range(0, len(tensors), bucket):
        model.weights.write(tensors[start : start + bucket])
    assert model.weights.checksums() == sent


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    expected = build(path).weights.checksums()
    spare = {"model.layers.2.eh_proj.weight": torch.zeros(2, 2), "model.layers.2.mlp.up_proj.weight": torch.zeros(3)}
    save_file(load_file(path / "model.safetensors") | spare, path / "model.safetensors")
    assert build(path).weights.checksums() == expected
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"no tensor 'model\.layers\.2"):
        build(path)


def test_partial_updates_touch_only_their_rows(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "qwen2", **BIG)
    model = build(path)
    before = model.weights.checksums()
    names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    news = [(name, torch.randn_like(model.weights.read(name))) for name in names]
    model.weights.write(news)
    after = model.weights.checksums()
    assert {name for name in before if before[name] != after[name]} == set(names)
    assert all(after[name] == tensor_checksum(tensor) for name, tensor in news)


def test_a_bucket_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model = build(make_tiny_model(tmp_path))
    before = model.weights.checksums()
    good = ("model.norm.weight", torch.zeros(64))
    for bad, found in (
        (("model.layers.9.mlp.up_proj.weight", torch.zeros(2)), "no tensor 'model.layers.9"),
        (
            ("lm_head.weight", torch.zeros(5, 64)),
            r"lm_head.weight comes with shape \[5, 64\]; the model has \[264, 64\]",
        ),
        (("lm_head.weight", torch.zeros(264, 64, dtype=torch.int64)), "int64"),
    ):
        with pytest.raises(RequestError, match=found):
            model.weights.write([good, bad])
    assert model.weights.checksums() == before


def test_a_tied_head_follows_the_embedding(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, tie_word_embeddings=True, **BIG)
    model = build(path)
    assert "lm_head.weight" not in model.weights.slots
    new = torch.randn(264, 288)
    model.weights.write([("model.embed_tokens.weight", new)])
    assert torch.equal(model._head.dense(), new)
    model.weights.write([("lm_head.weight", -new)])
    assert torch.equal(model.weights.read("model.embed_tokens.weight"), -new)
    assert torch.equal(model._head.dense(), -new)


def test_release_frees_and_an_update_fills_again(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "qwen3")
    model = build(path)
    before = model.weights.checksums()
    model.weights.release()
    assert len(model.weights.missing) == len(before)
    with pytest.raises(RequestError, match="holds no values"):
        model.weights.read("model.norm.weight")
    model.weights.write(list(load_file(path / "model.safetensors").items()))
    assert not model.weights.missing
    assert model.weights.checksums() == before


def test_sharded_and_incomplete_directories(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    expected = build(path).weights.checksums()
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        build(path)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in parts.items():
        save_file({name: weights[name] for name in members}, path / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert build(path).weights.checksums() == expected
    save_file({name: weights[name] for name in names[5:-1]}, path / "b.safetensors")
    with pytest.raises(ConfigError, match=f"lacks 1 tensors, such as {names[-1]}"):
        build(path)
    (path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"misses .*b\.safetensors"):
        build(path)


def test_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    config = json.loads((make_tiny_model(tmp_path) / "config.json").read_text())
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in tiny_weights(config, 0).items())


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("true",)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (_Evil(), "system"),
        ([("a", torch.zeros(2))], "by file name"),
        ({"a": 1}, "holds a dict"),
        ([("a", 1)], "pairs"),
    ],
)
def test_payloads_that_are_no_shared_tensors_are_refused(value: object, found: str) -> None:
    payload = base64.b64encode(pickle.dumps(value)).decode()
    with pytest.raises(RequestError, match=found):
        read_shared_tensors([payload])


def test_broken_payloads_are_refused() -> None:
    for payloads in ([], ["a", "b"], ["!!"], [base64.b64encode(b"junk").decode()]):
        with pytest.raises(RequestError, match="serialized_named_tensors"):
            read_shared_tensors(payloads)


def test_shared_tensors_are_read_in_place() -> None:
    tensors = [("a", torch.randn(3, 5)), ("b", torch.randn(7).bfloat16()), ("c", torch.zeros(0))]
    bucket = FlatBucket(tensors)
    try:
        for payload in bucket.payloads(3):  # each receiver has its own note
            read = read_shared_tensors([payload], "flattened_bucket")
            assert [name for name, _ in read] == ["a", "b", "c"]
            assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(read, tensors, strict=True))
            read[0][1][0, 0] = tensors[0][1][0, 0] = -1.0
            assert bucket.views[0][1][0, 0] == -1.0
    finally:
        bucket.free()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda value: value.pop("metadata"), "no flattened bucket"),
        (lambda value: value.update(flattened_tensor=torch.zeros(3)), "not one of bytes"),
        (lambda value: setattr(value["metadata"][0], "start_idx", 64), "a lies at bytes 64 to 72 of a bucket of 64"),
        (lambda value: setattr(value["metadata"][0], "start_idx", 1), "a lies at bytes 1 to 9"),
        (lambda value: setattr(value["metadata"][0], "dtype", "int"), "a dtype of its metadata is none"),
    ],
)
def test_buckets_that_do_not_hold_what_they_say_are_refused(change: Any, found: str) -> None:
    flat = torch.zeros(64, dtype=torch.uint8)
    meta = SimpleNamespace(name="a", shape=torch.Size([2]), dtype=torch.float32, start_idx=0, end_idx=8, numel=8)
    value = {"flattened_tensor": flat, "metadata": [meta]}
    change(value)
    buffer = io.BytesIO()
    with sharing_by_name():
        ForkingPickler(buffer).dump(value)
    with pytest.raises(RequestError, match=found):
        read_shared_tensors([base64.b64encode(buffer.getvalue()).decode()], "flattened_bucket")
