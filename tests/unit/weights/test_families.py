"""Weight tables: bit-exact in both directions, whole and sharded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.weights.families import FAMILIES
from slime.weights.families.family import global_name, local_layer
from slime.weights.ops import ModelShape, PadVocab, Rename, SplitGateUp, SplitQKV
from tests.support.tiny_models import tiny_weights


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


@settings(max_examples=30, deadline=None)
@given(config=model_configs(), tp=st.sampled_from([1, 2, 4]))
def test_hf_to_megatron_shards_to_hf_is_bit_exact(config: dict, tp: int) -> None:
    family, shape = FAMILIES[config["model_type"]], shape_of(config, 4)
    weights = tiny_weights(config)
    found: dict[str, torch.Tensor] = {}
    layers = range(config["num_hidden_layers"])
    for rule in family.rules:
        for layer in layers if "{layer}" in rule.megatron else [None]:
            names = rule.hf_names(layer)
            if names == ("lm_head.weight",) and config["tie_word_embeddings"]:
                continue
            whole = rule.op.to_megatron([weights[name] for name in names], shape)
            shards = [rule.op.shard(whole, rank, tp) for rank in range(tp)]
            assert all(shard.shape == shards[0].shape for shard in shards)
            back = rule.op.to_hf(rule.op.gather(shards), shape)
            found.update(zip(names, back, strict=True))
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


def test_names_of_layers() -> None:
    family = FAMILIES["llama"]
    rule, layer = family.rule("decoder.layers.17.mlp.linear_fc1.weight")
    assert layer == 17
    assert rule.hf_names(layer) == ("model.layers.17.mlp.gate_proj.weight", "model.layers.17.mlp.up_proj.weight")
    assert family.rule("decoder.final_layernorm.weight")[1] is None
    with pytest.raises(KeyError, match="no weight rule"):
        family.rule("decoder.layers.0.mlp.router.weight")
    assert local_layer("decoder.layers.3.mlp.linear_fc2.weight") == 3
    assert global_name("decoder.layers.3.mlp.linear_fc2.weight", 11) == "decoder.layers.11.mlp.linear_fc2.weight"
    assert global_name("embedding.word_embeddings.weight", None) == "embedding.word_embeddings.weight"
