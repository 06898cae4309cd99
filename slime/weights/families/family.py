"""What a weight table is, and how a tensor's rule is found in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from slime.weights.ops import Rename, Rule

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")
_EXPERT = re.compile(r"(\.local_experts\.)(\d+)(\.)")
OUTPUT_LAYER = "output_layer.weight"
VALUE_HEAD = (OUTPUT_LAYER, "output_layer.bias")
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor stands in a table: its row, and the layer and expert that it belongs to, if any."""

    rule: Rule
    layer: int | None
    expert: int | None

    @property
    def name(self) -> str:
        """Megatron's global name."""
        return self.rule.megatron.format(layer=self.layer, expert=self.expert)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The Hugging Face names of its parts."""
        return self.rule.hf_names(self.layer, self.expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Args:
        model_type: ``model_type`` in its ``config.json``.
        rules: Its table, in the order in which tensors are exported; names are global, whatever the
            pipeline stage.
        qkv_bias: Whether query, key and value projections have a bias.
        qkv_bias_key: The entry of ``config.json`` that may say otherwise, where there is one.
        qk_norm: Whether query and key heads are normalised.
        latent_attention: Whether attention is multi-latent.
    """

    model_type: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False
    qkv_bias_key: str | None = None
    qk_norm: bool = False
    latent_attention: bool = False

    def place(self, megatron_name: str) -> Place:
        """A Megatron tensor's place in the table.

        Args:
            megatron_name: Global name without wrapper prefixes.

        Raises:
            KeyError: The table has no such tensor.
        """
        layer, expert = _LAYER.match(megatron_name), _EXPERT.search(megatron_name)
        wanted = _EXPERT.sub(r"\1{expert}\3", _LAYER.sub(r"\1{layer}\3", megatron_name))
        for rule in self.rules:
            if rule.megatron == wanted:
                return Place(rule=rule, layer=_number(layer), expert=_number(expert))
        raise KeyError(f"unknown parameter name {megatron_name!r}: {self.model_type} has no weight rule for it")


def with_value_head(family: Family) -> Family:
    """The family's value models: the head is that of a Hugging Face classifier with one label."""
    trunk = tuple(rule for rule in family.rules if rule.megatron != OUTPUT_LAYER)
    head = tuple(Rule(name, (f"score.{name.rpartition('.')[2]}",), Rename()) for name in VALUE_HEAD)
    return replace(family, rules=(*trunk, *head))


def _number(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(match[2])


def global_name(name: str, layer_number: int | None, first_expert: int = 0) -> str:
    """A chunk's parameter name with its global layer and expert numbers.

    Args:
        name: As in the chunk, where layers and experts count from 0.
        layer_number: The layer's global number, from 0; None for tensors outside layers.
        first_expert: The global number of this rank's first expert.
    """
    if layer_number is None:
        return name
    name = _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}{m[3]}", name)
    return _LAYER.sub(rf"\g<1>{layer_number}\3", name)


def local_layer(name: str) -> int | None:
    """The layer's number within its chunk; None for tensors outside layers."""
    return _number(_LAYER.match(name))
