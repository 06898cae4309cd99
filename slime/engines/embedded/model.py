"""The decoder: one forward pass over prompt chunks and live rows together.

Everything but attention runs over all tokens of the step at once, whoever they belong to; only attention tells prompts
from rows. The head runs on the asked-for positions only. Tests hold: logits equal those of transformers in float32, and
a request gets the same results alone and among others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.engines.embedded.attention import DecodeAttention, PromptAttention
from slime.engines.embedded.experts import ExpertMlp, GatedMlp
from slime.engines.embedded.grouped import GroupedAttention
from slime.engines.embedded.kv import ROUTE_DTYPE
from slime.engines.embedded.latent import LatentAttention
from slime.engines.embedded.linear import Homes
from slime.engines.embedded.norm import Norm
from slime.engines.embedded.rope import RotationTable
from slime.engines.embedded.shape import ModelShape
from slime.engines.embedded.weights import Slot, WeightStore, named_rows


class _Layer:
    def __init__(self, shape: ModelShape, index: int, homes: Homes) -> None:
        hidden, eps, experts = shape.hidden_size, shape.rms_norm_eps, shape.experts
        self.input_norm = Norm(hidden, eps, homes)
        self.attention = GroupedAttention(shape, homes) if shape.latent is None else LatentAttention(shape, homes)
        self.post_norm = Norm(hidden, eps, homes)
        self.mlp: GatedMlp | ExpertMlp
        if experts is not None and index in experts.layers:
            self.mlp = ExpertMlp(shape, experts, homes)
        else:
            self.mlp = GatedMlp(hidden, shape.intermediate_size, homes, bias=shape.mlp_bias)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {
            **self.input_norm.slots(prefix + "input_layernorm"),
            **self.attention.slots(prefix + "self_attn."),
            **self.post_norm.slots(prefix + "post_attention_layernorm"),
            **self.mlp.slots(prefix + "mlp."),
        }


class Decoder:
    """A decoder of one of the known architectures.

    Args:
        shape: Sizes and switches.
        dtype: Of weights and activations.
        device: Where they live.
    """

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        homes = Homes(dtype, device)
        self._embed = homes.plain(shape.vocab_size, shape.hidden_size)
        self._layers = [_Layer(shape, i, homes) for i in range(shape.num_layers)]
        self._norm = Norm(shape.hidden_size, shape.rms_norm_eps, homes)
        self._head = homes.linear(shape.vocab_size, shape.hidden_size)
        self._rotations = RotationTable(shape.rope, dtype=dtype, device=device)
        self.weights = self._store()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        prompts: PromptAttention | None,
        decode: DecodeAttention | None,
        split: int,
        wanted: Tensor,
    ) -> Tensor:
        """Run one step; keys, values and experts of its tokens are kept by ``prompts`` and ``decode``.

        Args:
            tokens: ``[T]`` int64, prompt chunks first, then one token per live row.
            positions: ``[T]`` int64.
            prompts: Attention of the first ``split`` tokens.
            decode: Attention of the others.
            split: Number of prompt tokens.
            wanted: ``[R]`` int64 indices of tokens whose logits are asked for.

        Returns:
            ``[R, V]`` logits in the model's dtype.
        """
        cos, sin = self._rotations.at(positions)
        residual = F.embedding(tokens, self._embed.data)
        routes = self._new_routes(len(tokens))
        for i, layer in enumerate(self._layers):
            q, k, v = layer.attention.project(layer.input_norm(residual), cos, sin)
            mixed = _attention(i, q, k, v, prompts, decode, split)
            # Work behind the last attention is row by row, so only rows that were asked for need it; but every
            # token has experts.
            is_last = i == len(self._layers) - 1
            if is_last and isinstance(layer.mlp, GatedMlp):
                mixed, residual = mixed[wanted], residual[wanted]
            residual = residual + layer.attention.output(mixed)
            x = layer.post_norm(residual)
            if isinstance(layer.mlp, GatedMlp):
                residual = residual + layer.mlp(x)
                continue
            routing = layer.mlp.route(x)
            if routes is not None:
                routes[:, i] = routing.experts.to(routes.dtype)
            if is_last:
                x, residual, routing = x[wanted], residual[wanted], routing.of(wanted)
            residual = residual + layer.mlp(x, routing)
        if routes is not None:
            _keep_routes(routes, prompts, decode, split)
        return self._head(self._norm(residual))

    def _new_routes(self, num_tokens: int) -> Tensor | None:
        experts = self.shape.experts
        if experts is None:
            return None
        size = (num_tokens, self.shape.num_layers, experts.num_active)
        return torch.zeros(size, dtype=ROUTE_DTYPE, device=self.device)

    def _store(self) -> WeightStore:
        s = self.shape
        slots: dict[str, Slot] = {"model.embed_tokens.weight": Slot(self._embed, 0, s.vocab_size)}
        for i, layer in enumerate(self._layers):
            slots |= layer.slots(f"model.layers.{i}.")
        slots |= self._norm.slots("model.norm")
        spare = tuple(f"model.layers.{s.num_layers + i}." for i in range(s.num_spare_layers))
        if s.tied:
            return WeightStore(
                slots,
                tied=[(self._embed, self._head)],
                aliases={"lm_head.weight": "model.embed_tokens.weight"},
                spare=spare,
            )
        return WeightStore(slots | named_rows("", self._head, {"lm_head": None}), spare=spare)


def _attention(
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompts: PromptAttention | None,
    decode: DecodeAttention | None,
    split: int,
) -> Tensor:
    if prompts is None:
        assert decode is not None, "a step has prompt tokens, live rows or both"
        return decode(layer, q, k, v)
    if decode is None:
        return prompts(layer, q, k, v)
    return torch.cat((prompts(layer, q[:split], k[:split], v[:split]), decode(layer, q[split:], k[split:], v[split:])))


def _keep_routes(routes: Tensor, prompts: PromptAttention | None, decode: DecodeAttention | None, split: int) -> None:
    if prompts is not None:
        prompts.keep_routes(routes[:split])
    if decode is not None:
        decode.keep_routes(routes[split:])
