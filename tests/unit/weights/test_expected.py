"""An engine's checksums from the tensors that are sent, against tensors put together by hand."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.weights.checksum import tensor_checksum
from slime.weights.digests import CpuDigest
from slime.weights.engine_names import EngineLayout, EngineTable, known_layout
from slime.weights.expected import Checksums, FusedExpectation, PlainExpectation
from tests.support.tiny_models import Family, make_tiny_model, tiny_weights


def model_of(tmp_path: Path, family: Family, **overrides: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    path = make_tiny_model(tmp_path / family, family, tokenizer=False, num_hidden_layers=2, **overrides)
    config = json.loads((path / "config.json").read_text())
    return config, tiny_weights(config)


def layout_of(config: dict[str, Any], **info: Any) -> EngineLayout:
    layout = known_layout(info, config)
    assert isinstance(layout, EngineLayout), layout
    return layout


def expected_of(layout: EngineLayout, items: list[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Checksums:
    expectation = FusedExpectation(EngineTable(layout), CpuDigest, dtype, lambda _: True)
    for name, tensor in items:
        sent = tensor.clone()
        expectation.add(name, sent)
        sent.zero_()  # the sender uses its memory again
    return expectation.finish()


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def held_by(
    config: dict[str, Any], weights: dict[str, Tensor], rank: int = 0, tp: int = 1, ep: int = 1
) -> dict[str, Tensor]:
    """What process ``rank`` of an engine holds, as SGLang's model classes define it; written without the tables."""
    held: dict[str, Tensor] = {}

    def rows(tensor: Tensor, size: int = tp, index: int = rank) -> Tensor:
        return tensor.chunk(size, 0)[index]

    def columns(tensor: Tensor, size: int = tp, index: int = rank) -> Tensor:
        return tensor.chunk(size, 1)[index]

    def kv_rows(tensor: Tensor) -> Tensor:
        heads = config["num_key_value_heads"]
        return tensor.chunk(heads)[rank // (tp // heads)] if tp > heads else rows(tensor)

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            missing = -len(weights[name]) % 64  # a multiple of 64 that any of the tested sizes divides
            padded = torch.cat([weights[name], torch.zeros(missing, weights[name].size(1), dtype=weights[name].dtype)])
            held[name] = rows(padded)
    held["model.norm.weight"] = weights["model.norm.weight"]
    moe_tp = tp // ep
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        w = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
        mine: dict[str, Tensor] = {}
        for name, tensor in w.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")) and ".experts." not in name:
                mine[name] = columns(tensor)
            elif (
                "norm" in name
                or "gate.weight" in name
                or name.endswith(("e_score_correction_bias", "expert_gate.weight"))
            ):
                mine[name] = tensor
            elif name.endswith(("q_b_proj.weight", "kv_b_proj.weight")):
                mine[name] = rows(tensor)
        for kind in ("weight", "bias"):
            if f"self_attn.k_proj.{kind}" in w:
                q, k, v = (w[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
                mine[f"self_attn.qkv_proj.{kind}"] = torch.cat([rows(q), kv_rows(k), kv_rows(v)])
        if "self_attn.q_a_proj.weight" in w:
            both = [w["self_attn.q_a_proj.weight"], w["self_attn.kv_a_proj_with_mqa.weight"]]
            mine["self_attn.fused_qkv_a_proj_with_mqa.weight"] = torch.cat(both)
        elif "self_attn.kv_a_proj_with_mqa.weight" in w:
            mine["self_attn.kv_a_proj_with_mqa.weight"] = w["self_attn.kv_a_proj_with_mqa.weight"]
            mine["self_attn.q_proj.weight"] = rows(w["self_attn.q_proj.weight"])
        for mlp in ("mlp", "mlp.shared_expert", "mlp.shared_experts"):
            if f"{mlp}.up_proj.weight" in w:
                gate, up = w[f"{mlp}.gate_proj.weight"], w[f"{mlp}.up_proj.weight"]
                mine[f"{mlp}.gate_up_proj.weight"] = torch.cat([rows(gate), rows(up)])
        if "mlp.experts.0.up_proj.weight" in w:
            count = sum(name.endswith("up_proj.weight") and ".experts." in name for name in w)
            local = range(count)[rank // moe_tp * (count // ep) :][: count // ep]
            of = {p: [w[f"mlp.experts.{e}.{p}_proj.weight"] for e in local] for p in ("gate", "up", "down")}
            cut = {"size": moe_tp, "index": rank % moe_tp}
            pairs = zip(of["gate"], of["up"], strict=True)
            mine["mlp.experts.w13_weight"] = torch.stack(
                [torch.cat([rows(g, **cut), rows(u, **cut)]) for g, u in pairs]
            )
            mine["mlp.experts.w2_weight"] = torch.stack([columns(down, **cut) for down in of["down"]])
        held |= {start + name: tensor for name, tensor in mine.items()}
    return held


MODELS: list[tuple[Family, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen2_moe", {}),
    ("qwen3_moe", {}),
    ("glm4_moe", {}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None}),
]


@pytest.mark.parametrize(("family", "overrides"), MODELS)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_every_process_of_every_family(
    tmp_path: Path, family: Family, overrides: dict[str, Any], tp: int, ep: int
) -> None:
    config, weights = model_of(tmp_path, family, **overrides)
    items = list(weights.items())
    random.Random(tp).shuffle(items)  # parts of a tensor need not come in order, nor together
    found = expected_of(layout_of(config, tp_size=tp, ep_size=ep), items)
    assert not found.unknown
    sizes: dict[str, int] = {}
    for rank in range(tp):
        held = held_by(config, weights, rank, tp, ep)
        assert found.ranks[rank] == {name: sha(tensor) for name, tensor in held.items()}
        for name, tensor in held.items():
            sizes[name] = sizes.get(name, 0) + tensor.nbytes
    assert found.sizes == sizes


@pytest.mark.parametrize(("family", "overrides"), [MODELS[4], MODELS[5], MODELS[6]])
def test_a_wrong_value_anywhere_changes_the_tensor_that_holds_it(
    tmp_path: Path, family: Family, overrides: dict[str, Any]
) -> None:
    config, weights = model_of(tmp_path, family, **overrides)
    layout = layout_of(config, tp_size=2)
    right = expected_of(layout, list(weights.items()))
    table = EngineTable(layout)
    for name in weights:
        wrong = {key: tensor.clone() for key, tensor in weights.items()}
        wrong[name].view(-1)[-1] += 1e-3
        found = expected_of(layout, list(wrong.items()))
        place = table.place(name)
        assert place is not None
        changed = [
            {key for key in mine if mine[key] != theirs[key]}
            for mine, theirs in zip(right.ranks, found.ranks, strict=True)
        ]
        assert changed[1] == {place.name}, "the last value is on the last process"
        assert changed[0] == ({place.name} if place.row.is_replicated else set())


def test_values_are_summed_up_in_the_engines_dtype(tmp_path: Path) -> None:
    config, weights = model_of(tmp_path, "glm4_moe")
    bias = "e_score_correction_bias"
    as_sent = {name: tensor if name.endswith(bias) else tensor.bfloat16() for name, tensor in weights.items()}
    held = held_by(config, as_sent)
    held |= {name: tensor.float() for name, tensor in held.items() if name.endswith("mlp.gate.weight")}
    found = expected_of(layout_of(config), list(as_sent.items()), torch.bfloat16)
    assert found.ranks == [{name: sha(tensor) for name, tensor in held.items()}]
    found = expected_of(layout_of(config), [("model.norm.weight", weights["model.norm.weight"])], torch.bfloat16)
    assert found.ranks[0]["model.norm.weight"] == sha(as_sent["model.norm.weight"]), "the engine converts it"


def test_a_vocabulary_that_processes_do_not_divide_is_padded_further(tmp_path: Path) -> None:
    config, weights = model_of(tmp_path, "qwen3")  # 264 tokens: 320 with padding, which 3 do not divide
    name = "lm_head.weight"
    found = expected_of(layout_of(config, tp_size=3), [(name, weights[name])])
    whole = torch.cat([weights[name], torch.zeros(384 - 264, 64)])
    assert [mine[name] for mine in found.ranks] == [sha(rows) for rows in whole.chunk(3)]


def test_what_the_table_does_not_know_is_named(tmp_path: Path) -> None:
    config, weights = model_of(tmp_path, "qwen3_moe")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    strange = torch.zeros(5, 5)
    found = expected_of(layout_of(config, tp_size=2), [*weights.items(), ("model.strange.weight", strange)])
    assert set(found.unknown) == {"model.strange.weight", "model.layers.1.mlp.experts.w13_weight"}
    odd = layout_of(config | {"num_attention_heads": 3}, tp_size=2)
    found = expected_of(odd, [("model.layers.0.self_attn.o_proj.weight", torch.zeros(64, 3))])
    assert "cannot be divided" in found.unknown["model.layers.0.self_attn.o_proj.weight"]
    assert not any(found.ranks)


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"quantization": "fp8"}, "quantization is fp8"),
        ({"enable_dp_attention": True}, "enable_dp_attention"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "moe_runner_backend is flashinfer_trtllm"),
        ({"tp_size": 2, "device": "cpu"}, "pads sizes that 2 processes do not divide"),
    ],
)
def test_layouts_that_are_not_known_say_why(tmp_path: Path, info: dict[str, Any], reason: str) -> None:
    config, _ = model_of(tmp_path, "qwen3_moe")  # experts are 48 wide: not a multiple of 2 x 32
    assert reason in str(known_layout(info, config))
    assert "no table of the family 'mamba'" in str(known_layout({}, config | {"model_type": "mamba"}))


def test_an_engine_with_the_same_names_is_expected_to_hold_the_same_tensors(tmp_path: Path) -> None:
    _, weights = model_of(tmp_path, "qwen3")
    expectation = PlainExpectation(torch.bfloat16, lambda name: "layers.1." in name)
    for name, tensor in weights.items():
        expectation.add(name, tensor)
    found = expectation.finish()
    wanted = {name: tensor_checksum(t.bfloat16()) for name, t in weights.items() if "layers.1." in name}
    assert found.ranks == [wanted]
    assert found.sizes.keys() == weights.keys()
