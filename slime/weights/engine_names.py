"""How SGLang holds the tensors of a Hugging Face checkpoint: fused, stacked, and divided over its processes.

Owns the table of engine tensors, which is derived from the families' tables: what is one Megatron tensor of several
parts is mostly one tensor there too. What an engine holds otherwise (its own quantisation, layouts of some expert
kernels, attention with data parallelism) has no row here; ``known_layout`` says so. Tests hold: cut as the table says,
every tensor's bytes are those of a real server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from slime.weights.families import FAMILIES, Family
from slime.weights.ops import PadVocab, Rename, Rule, SplitGateUp, SplitQKV

_LAYER = re.compile(r"(\.layers\.)(\d+)(\.)")
_EXPERT = re.compile(r"(\.experts\.)(\d+)(\.)")
_VOCABULARY_PADDING = 64
_LATENT_DOWN = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
_LATENT_FUSED = "self_attn.fused_qkv_a_proj_with_mqa.weight"
_FLOAT32_ENDINGS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": ("e_score_correction_bias",),
    "kimi_k2": ("e_score_correction_bias",),
    "glm4_moe": ("e_score_correction_bias", "mlp.gate.weight"),
}


class Cut(Enum):
    """How the processes of an engine divide one Hugging Face tensor."""

    WHOLE = "every process holds it whole"
    ROWS = "the rows, evenly"
    COLUMNS = "the columns, evenly"
    KEY_VALUE_ROWS = "the rows, evenly; with more processes than heads several hold the same head"
    VOCABULARY = "the rows, after padding with zeros to a multiple"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """What decides how an engine divides a model.

    Args:
        model_type: The model's family.
        tp_size: Tensor-parallel processes.
        ep_size: Groups of these that divide the experts.
        num_key_value_heads: Of the model.
        num_experts: Routed experts of a layer; 0 for a dense model.
        vocab_size: Rows of the embedding in the checkpoint.
        has_query_latent: Whether the query projection has a latent of its own, where attention is latent.
    """

    model_type: str
    tp_size: int
    ep_size: int
    num_key_value_heads: int
    num_experts: int
    vocab_size: int
    has_query_latent: bool = False

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all processes."""
        unit = _VOCABULARY_PADDING
        if _round_up(self.vocab_size, unit) % self.tp_size:
            unit *= self.tp_size
        return _round_up(self.vocab_size, unit)

    def experts(self, rank: int) -> range:
        """The experts that process ``rank`` holds."""
        count = self.num_experts // self.ep_size
        first = rank // (self.tp_size // self.ep_size) * count
        return range(first, first + count)

    def shard(self, cut: Cut, rank: int, *, is_expert: bool) -> tuple[int, int]:
        """(index, number) of the piece of a tensor that process ``rank`` holds."""
        if cut is Cut.WHOLE:
            return 0, 1
        size = self.tp_size // self.ep_size if is_expert else self.tp_size
        rank %= size
        if cut is Cut.KEY_VALUE_ROWS and size > self.num_key_value_heads:
            return rank * self.num_key_value_heads // size, self.num_key_value_heads
        return rank, size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One kind of tensor in an engine.

    Args:
        name: Its name; ``{layer}`` stands for the layer.
        parts: Hugging Face names and cuts of what it consists of, in the order of its rows.
        is_stacked: Whether it holds these parts of every expert, one expert after the other.
        is_float32: Whether it is held in float32 whatever the model's dtype.
    """

    name: str
    parts: tuple[tuple[str, Cut], ...]
    is_stacked: bool = False
    is_float32: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every process holds the same."""
        return not self.is_stacked and all(cut is Cut.WHOLE for _, cut in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """Where one Hugging Face tensor belongs: part ``part`` of the row's tensor called ``name``, of ``expert``."""

    name: str
    row: EngineRow
    part: int
    expert: int | None

    @property
    def cut(self) -> Cut:
        """How the tensor is divided."""
        return self.row.parts[self.part][1]


class EngineTable:
    """Where each tensor of one model belongs in an engine.

    Args:
        layout: The engine's layout; its ``model_type`` must be in ``FAMILIES``.
    """

    def __init__(self, layout: EngineLayout) -> None:
        self.layout = layout
        family = FAMILIES[layout.model_type]
        self._places: dict[str, tuple[EngineRow, int]] = {}
        for row in engine_rows(family, has_query_latent=layout.has_query_latent):
            for index, (name, _) in enumerate(row.parts):
                self._places[name] = (row, index)

    def place(self, hf_name: str) -> EnginePlace | None:
        """Where a tensor belongs; None if the table does not know it."""
        layer, expert = _LAYER.search(hf_name), _EXPERT.search(hf_name)
        wanted = _EXPERT.sub(r"\1{expert}\3", _LAYER.sub(r"\1{layer}\3", hf_name, count=1))
        found = self._places.get(wanted)
        if found is None:
            return None
        row, part = found
        name = row.name.replace("{layer}", layer[2]) if layer else row.name
        return EnginePlace(name=name, row=row, part=part, expert=int(expert[2]) if expert else None)

    def num_parts(self, row: EngineRow, rank: int) -> int:
        """Tensors that make up process ``rank``'s piece of a row's tensor."""
        return len(row.parts) * (len(self.layout.experts(rank)) if row.is_stacked else 1)

    def position(self, place: EnginePlace, rank: int) -> int | None:
        """Where the tensor stands among the parts of process ``rank``; None if that has nothing of it."""
        if place.expert is None:
            return place.part
        experts = self.layout.experts(rank)
        if place.expert not in experts:
            return None
        return (place.expert - experts.start) * len(place.row.parts) + place.part

    def pieces(self, place: EnginePlace, tensor: Tensor, rank: int) -> list[Tensor] | None:
        """Process ``rank``'s share of a tensor, with its padding; None if it cannot be divided like that."""
        if place.cut is Cut.VOCABULARY:
            return self._vocabulary_rows(tensor, rank)
        index, size = self.layout.shard(place.cut, rank, is_expert=place.expert is not None)
        dim = 1 if place.cut is Cut.COLUMNS else 0
        if size == 1:
            return [tensor]
        if tensor.size(dim) % size:
            return None
        share = tensor.size(dim) // size
        return [tensor.narrow(dim, index * share, share)]

    def _vocabulary_rows(self, tensor: Tensor, rank: int) -> list[Tensor] | None:
        if tensor.size(0) != self.layout.vocab_size:
            return None
        share = self.layout.padded_vocab_size // self.layout.tp_size
        held = tensor[rank * share : (rank + 1) * share]
        missing = share - held.size(0)
        return [held, tensor.new_zeros(missing, *tensor.shape[1:])] if missing else [held]


def engine_rows(family: Family, *, has_query_latent: bool) -> tuple[EngineRow, ...]:
    """The kinds of tensors an engine holds of a family's models."""
    rows: list[EngineRow] = []
    fused = has_query_latent and family.latent_attention
    for rule in family.rules:
        if fused and rule.hf[0].endswith(_LATENT_DOWN):
            if rule.hf[0].endswith(_LATENT_DOWN[0]):
                prefix = rule.hf[0].removesuffix(_LATENT_DOWN[0])
                parts = tuple((prefix + name, Cut.WHOLE) for name in _LATENT_DOWN)
                rows.append(EngineRow(name=prefix + _LATENT_FUSED, parts=parts))
            continue
        name, cuts = _held_as(rule)
        rows.append(
            EngineRow(
                name=name,
                parts=tuple(zip(rule.hf, cuts, strict=True)),
                is_stacked="{expert}" in rule.hf[0],
                is_float32=name.endswith(_FLOAT32_ENDINGS.get(family.model_type, ())),
            )
        )
    return tuple(rows)


def _held_as(rule: Rule) -> tuple[str, tuple[Cut, ...]]:
    """An engine's name for the tensor of a rule, and how its parts are divided."""
    first = rule.hf[0]
    match rule.op:
        case SplitQKV():
            return first.replace("q_proj", "qkv_proj"), (Cut.ROWS, Cut.KEY_VALUE_ROWS, Cut.KEY_VALUE_ROWS)
        case SplitGateUp() if "{expert}" in first:
            return first.replace("{expert}.gate_proj.", "w13_"), (Cut.ROWS, Cut.ROWS)
        case SplitGateUp():
            return first.replace("gate_proj", "gate_up_proj"), (Cut.ROWS, Cut.ROWS)
        case PadVocab():
            return first, (Cut.VOCABULARY,)
        case Rename(split=split):
            cut = {None: Cut.WHOLE, 0: Cut.ROWS, 1: Cut.COLUMNS}[split]
            return first.replace("{expert}.down_proj.", "w2_"), (cut,)
        case _:
            raise AssertionError(f"no engine layout for {rule.op}")


_CPU_UNIT = 32
"""SGLang's CPU kernels take intermediate sizes that are a multiple of this on every process."""
_PLAIN_EXPERT_RUNNERS = ("auto", "triton")
"""Kernels that read experts as they are in the checkpoint; "auto" takes others only for quantised models."""


def known_layout(info: Mapping[str, Any], model: Mapping[str, Any]) -> EngineLayout | str:
    """The layout of an SGLang server, or why its tensors cannot be compared.

    Args:
        info: Its ``/server_info``.
        model: ``config.json`` of the model.
    """
    model_type = str(model.get("model_type"))
    refused = {
        "quantization": info.get("quantization") is not None,
        "enable_dp_attention": bool(info.get("enable_dp_attention")),
        "moe_runner_backend": info.get("moe_runner_backend", "auto") not in _PLAIN_EXPERT_RUNNERS,
        "moe_a2a_backend": info.get("moe_a2a_backend", "none") not in (None, "none"),
        "moe_dp_size": info.get("moe_dp_size", 1) not in (None, 1),
        "ep_num_redundant_experts": bool(info.get("ep_num_redundant_experts")),
        "enable_eplb": bool(info.get("enable_eplb")),
        "moe_dense_tp_size": info.get("moe_dense_tp_size") is not None,
    }
    reasons = [f"{name} is {info.get(name)}" for name, found in refused.items() if found]
    tp_size = int(info.get("tp_size") or 1)
    if tp_size > 1 and str(info.get("device")) == "cpu" and _is_padded_on_cpu(model, tp_size):
        reasons.append(f"on a CPU it pads sizes that {tp_size} processes do not divide evenly")
    if model_type not in FAMILIES:
        reasons.append(f"no table of the family {model_type!r}")
    if reasons:
        return ", ".join(reasons)
    return EngineLayout(
        model_type=model_type,
        tp_size=tp_size,
        ep_size=int(info.get("ep_size") or 1),
        num_key_value_heads=int(model.get("num_key_value_heads") or model["num_attention_heads"]),
        num_experts=int(model.get("num_experts") or model.get("n_routed_experts") or 0),
        vocab_size=int(model["vocab_size"]),
        has_query_latent=model.get("q_lora_rank") is not None,
    )


def _is_padded_on_cpu(model: Mapping[str, Any], tp_size: int) -> bool:
    units = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": _CPU_UNIT,
        "moe_intermediate_size": _CPU_UNIT,
        "shared_expert_intermediate_size": _CPU_UNIT,
    }
    return any(model.get(name) and int(model[name]) % (unit * tp_size) for name, unit in units.items())


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
