"""What a weight table is, and how a tensor's rule is found in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from slime.weights.ops import Rename, Rule

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")
OUTPUT_LAYER = "output_layer.weight"
VALUE_HEAD = (OUTPUT_LAYER, "output_layer.bias")
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Args:
        model_type: ``model_type`` in its ``config.json``.
        rules: Its table, in the order in which tensors are exported; names are global, whatever the
            pipeline stage.
        qkv_bias: Whether query, key and value projections always have a bias.
        qk_norm: Whether query and key heads are normalised.
    """

    model_type: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False

    def rule(self, megatron_name: str) -> tuple[Rule, int | None]:
        """The row of a Megatron tensor, and its layer.

        Args:
            megatron_name: Global name without wrapper prefixes.

        Raises:
            KeyError: The table has no such tensor.
        """
        match = _LAYER.match(megatron_name)
        layer = int(match[2]) if match else None
        wanted = _LAYER.sub(r"\1{layer}\3", megatron_name)
        for rule in self.rules:
            if rule.megatron == wanted:
                return rule, layer
        raise KeyError(f"unknown parameter name {megatron_name!r}: {self.model_type} has no weight rule for it")


def with_value_head(family: Family) -> Family:
    """The family's value models: the head is that of a Hugging Face classifier with one label."""
    trunk = tuple(rule for rule in family.rules if rule.megatron != OUTPUT_LAYER)
    head = tuple(Rule(name, (f"score.{name.rpartition('.')[2]}",), Rename()) for name in VALUE_HEAD)
    return replace(family, rules=(*trunk, *head))


def global_name(name: str, layer_number: int | None) -> str:
    """A chunk's parameter name with its global layer number.

    Args:
        name: As in the chunk, where layers count from 0.
        layer_number: The layer's global number, from 0; None for tensors outside layers.
    """
    return name if layer_number is None else _LAYER.sub(rf"\g<1>{layer_number}\3", name)


def local_layer(name: str) -> int | None:
    """The layer's number within its chunk; None for tensors outside layers."""
    match = _LAYER.match(name)
    return int(match[2]) if match else None
