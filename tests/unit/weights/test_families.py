"""Weight tables: bit-exact in both directions, whole and sharded."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.weights.families import FAMILIES, Family
from slime.weights.families.family import global_name, local_layer
from slime.weights.ops import ModelShape, PadVocab, Rename, SplitGateUp, SplitQKV
from tests.support.tiny_models import tiny_weights

_WIDTH = st.sampled_from([4, 8])
_QWEN_EXPERTS = {
    "num_experts": st.sampled_from([4, 8]),
    "moe_intermediate_size": _WIDTH,
    "mlp_only_layers": st.sampled_from([[], [0], [1, 3]]),
}
_DEEPSEEK_EXPERTS = {
    "n_routed_experts": st.sampled_from([4, 8]),
    "n_shared_experts": st.integers(1, 2),
    "moe_intermediate_size": _WIDTH,
    "first_k_dense_replace": st.integers(0, 3),
}
_LATENTS = {
    "q_lora_rank": st.sampled_from([None, 3]),
    "kv_lora_rank": st.integers(1, 5),
    "qk_nope_head_dim": st.integers(1, 4),
    "qk_rope_head_dim": st.integers(1, 2),
    "v_head_dim": st.integers(1, 4),
}
_EXTRAS: Mapping[str, st.SearchStrategy[dict[str, object]]] = {
    "qwen2_moe": st.fixed_dictionaries({**_QWEN_EXPERTS, "shared_expert_intermediate_size": _WIDTH}),
    "qwen3_moe": st.fixed_dictionaries(_QWEN_EXPERTS),
    "glm4_moe": st.fixed_dictionaries(
        {**_DEEPSEEK_EXPERTS, "use_qk_norm": st.booleans(), "attention_bias": st.booleans()}
    ),
    "deepseek_v3": st.fixed_dictionaries({**_DEEPSEEK_EXPERTS, **_LATENTS}),
    "kimi_k2": st.fixed_dictionaries({**_DEEPSEEK_EXPERTS, **_LATENTS}),
}


@st.composite
def model_configs(draw: st.DrawFn) -> dict[str, object]:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    groups = draw(st.sampled_from([4, 8]))
    return {
        "model_type": family,
        "vocab_size": draw(st.integers(1, 40)),
        "hidden_size": draw(st.integers(1, 5)),
        "intermediate_size": 4 * draw(st.integers(1, 3)),
        "num_hidden_layers": draw(st.integers(1, 12)),
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "num_key_value_heads": groups,
        "head_dim": draw(st.integers(1, 4)),
        "tie_word_embeddings": draw(st.booleans()),
        **(draw(_EXTRAS[family]) if family in _EXTRAS else {}),
        "torch_dtype": draw(st.sampled_from(["float32", "bfloat16"])),
    }


def shape_of(config: dict, divisor: int) -> ModelShape:
    return ModelShape(
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        padded_vocab_size=-(-config["vocab_size"] // divisor) * divisor,
    )


def megatron_names(family: Family, layers: int, experts: int) -> list[str]:
    """The name of every row in every layer and of every expert, rows first."""
    return [
        rule.megatron.format(layer=layer, expert=expert)
        for rule in family.rules
        for layer in range(layers if "{layer}" in rule.megatron else 1)
        for expert in range(experts if "{expert}" in rule.megatron else 1)
    ]


@settings(max_examples=30)
@given(config=model_configs(), tp=st.sampled_from([1, 2, 4]), etp=st.sampled_from([1, 2, 4]))
def test_hf_to_megatron_shards_to_hf_is_bit_exact(config: dict, tp: int, etp: int) -> None:
    family, shape = FAMILIES[config["model_type"]], shape_of(config, 4)
    weights = tiny_weights(config)
    found: dict[str, torch.Tensor] = {}
    for name in megatron_names(
        family, config["num_hidden_layers"], config.get("num_experts") or config.get("n_routed_experts") or 0
    ):
        place = family.place(name)
        assert place.name == name
        if not set(place.hf_names) & weights.keys():  # of a tied head, or of the other kind of MLP in this layer
            continue
        op, size = place.rule.op, tp if place.expert is None else etp
        whole = op.to_megatron([weights[name] for name in place.hf_names], shape)
        shards = [op.shard(whole, rank, size) for rank in range(size)]
        assert all(shard.shape == shards[0].shape for shard in shards)
        found.update(zip(place.hf_names, op.to_hf(op.gather(shards), shape), strict=True))
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_qkv_is_ordered_by_query_group() -> None:
    shape = ModelShape(num_attention_heads=4, num_query_groups=2, head_dim=1, vocab_size=1, padded_vocab_size=1)
    q, k, v = torch.tensor([10.0, 11, 12, 13]), torch.tensor([20.0, 21]), torch.tensor([30.0, 31])
    assert SplitQKV().to_megatron([q, k, v], shape).tolist() == [10, 11, 20, 30, 12, 13, 21, 31]


def test_gate_and_up_are_divided_each() -> None:
    gate_up = torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])
    assert SplitGateUp().shard(gate_up, 1, 2).tolist() == [2, 3, 12, 13]


def test_row_parallel_weight_is_divided_by_columns() -> None:
    weight = torch.arange(8.0).view(2, 4)
    assert Rename(split=1).shard(weight, 1, 2).tolist() == [[2, 3], [6, 7]]


def test_vocabulary_is_padded_with_zeros_and_refused_when_too_large() -> None:
    shape = ModelShape(num_attention_heads=1, num_query_groups=1, head_dim=1, vocab_size=3, padded_vocab_size=4)
    padded = PadVocab().to_megatron([torch.ones(3, 2)], shape)
    assert padded.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    with pytest.raises(ValueError, match="5 embedding rows"):
        PadVocab().to_megatron([torch.ones(5, 2)], shape)


def test_rows_that_ranks_cannot_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows cannot be divided over 2"):
        Rename(split=0).shard(torch.ones(3, 1), 0, 2)


def test_names_of_layers_and_experts() -> None:
    family = FAMILIES["llama"]
    place = family.place("decoder.layers.17.mlp.linear_fc1.weight")
    assert (place.layer, place.expert) == (17, None)
    assert place.hf_names == ("model.layers.17.mlp.gate_proj.weight", "model.layers.17.mlp.up_proj.weight")
    assert family.place("decoder.final_layernorm.weight").layer is None
    with pytest.raises(KeyError, match="no weight rule"):
        family.place("decoder.layers.0.mlp.router.weight")
    expert = FAMILIES["qwen3_moe"].place("decoder.layers.3.mlp.experts.local_experts.12.linear_fc2.weight")
    assert (expert.layer, expert.expert) == (3, 12)
    assert expert.hf_names == ("model.layers.3.mlp.experts.12.down_proj.weight",)
    assert local_layer("decoder.layers.3.mlp.linear_fc2.weight") == 3
    assert global_name("decoder.layers.3.mlp.linear_fc2.weight", 11) == "decoder.layers.11.mlp.linear_fc2.weight"
    assert global_name("embedding.word_embeddings.weight", None) == "embedding.word_embeddings.weight"
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    assert global_name(name, 2, 4) == "decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight"
