"""Rows that decoder families share; those of the MLP are of a dense one."""

from slime.weights.families.family import EMBEDDING, OUTPUT_LAYER
from slime.weights.ops import PadVocab, Rename, Rule, SplitGateUp, SplitQKV

HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."


def layer_rule(megatron: str, hf: str | tuple[str, ...], op: Rename | SplitQKV | SplitGateUp) -> Rule:
    """A row whose names are relative to the layer."""
    names = (hf,) if isinstance(hf, str) else hf
    return Rule(MEGATRON_LAYER + megatron, tuple(HF_LAYER + name for name in names), op)


def qkv(kind: str) -> Rule:
    """Query, key and value projections: ``kind`` is "weight" or "bias"."""
    return layer_rule(
        f"self_attention.linear_qkv.{kind}", tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"), SplitQKV()
    )


QK_NORM = tuple(
    layer_rule(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", Rename()) for part in "qk"
)
EMBEDDING_RULE = Rule(EMBEDDING, ("model.embed_tokens.weight",), PadVocab())
ATTENTION = (
    layer_rule("input_layernorm.weight", "input_layernorm.weight", Rename()),
    qkv("weight"),
    layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Rename(split=1)),
)
MLP = (
    layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Rename()),
    layer_rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), SplitGateUp()),
    layer_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", Rename(split=1)),
)
HEAD = (
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Rename()),
    Rule(OUTPUT_LAYER, ("lm_head.weight",), PadVocab()),
)
