"""The decoder: one forward pass over prompt chunks and live rows together.

Linear layers run over all tokens of the step at once, whoever they belong to; only attention tells prompts from rows.
The head runs on the asked-for positions only. Tests hold: logits equal those of transformers in float32, and a request
gets the same results alone and among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.engines.embedded.attention import DecodeAttention, PromptAttention
from slime.engines.embedded.linear import Linear, Plain
from slime.engines.embedded.shape import ModelShape, inverse_frequencies
from slime.engines.embedded.weights import Slot, WeightStore


@dataclass(slots=True)
class _Layer:
    input_norm: Plain
    qkv: Linear
    q_norm: Plain | None
    k_norm: Plain | None
    o: Linear
    post_norm: Plain
    gate_up: Linear
    down: Linear


class Decoder:
    """A Llama, Qwen2 or Qwen3 decoder.

    Args:
        shape: Sizes and switches.
        dtype: Of weights and activations.
        device: Where they live.
    """

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._embed = self._plain(shape.vocab_size, shape.hidden_size)
        self._layers = [self._layer() for _ in range(shape.num_layers)]
        self._norm = self._plain(shape.hidden_size)
        self._head = self._linear(shape.vocab_size, shape.hidden_size, bias=False)
        self._inverse = inverse_frequencies(shape).to(device)
        self._cos, self._sin = self._rotations(0)
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
        """Run one step.

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
        self._extend_rotations(positions)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        residual = F.embedding(tokens, self._embed.data)
        for i, layer in enumerate(self._layers):
            q, k, v = self._project(layer, self._normed(residual, layer.input_norm), cos, sin)
            mixed = _attention(i, q, k, v, prompts, decode, split)
            if i == len(self._layers) - 1:  # later work is row by row: drop the rows that nobody asked for
                mixed, residual = mixed[wanted], residual[wanted]
            residual = residual + layer.o(mixed)
            gate, up = layer.gate_up(self._normed(residual, layer.post_norm)).chunk(2, dim=-1)
            residual = residual + layer.down(F.silu(gate) * up)
        return self._head(self._normed(residual, self._norm))

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        qkv = layer.qkv(x)
        heads = qkv.view(x.shape[0], -1, shape.head_dim)
        rotated, v = heads[:, : -shape.num_kv_heads], heads[:, -shape.num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._normed(rotated[:, : shape.num_heads], layer.q_norm)
            rotated = torch.cat((q, self._normed(rotated[:, shape.num_heads :], layer.k_norm)), dim=1)
        rotated = torch.addcmul(rotated * cos, torch.roll(rotated, shape.head_dim // 2, -1), sin)
        return rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], v

    def _normed(self, x: Tensor, weight: Plain) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.data, self.shape.rms_norm_eps)

    def _rotations(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, device=self.device).float()[:, None] * self._inverse
        sin = angles.sin()
        # The sign of "rotate half" is in the table, so that a plain roll of the channels is enough.
        return torch.cat((angles.cos(),) * 2, -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)

    def _extend_rotations(self, positions: Tensor) -> None:
        needed = int(positions.max()) + 1
        if needed > self._cos.shape[0]:
            self._cos, self._sin = self._rotations(max(1024, 1 << (needed - 1).bit_length()))

    def _plain(self, *shape: int) -> Plain:
        return Plain(*shape, dtype=self.dtype, device=self.device)

    def _linear(self, out_features: int, in_features: int, *, bias: bool) -> Linear:
        bias_home = self._plain(out_features) if bias else None
        return Linear(out_features, in_features, bias=bias_home, dtype=self.dtype, device=self.device)

    def _layer(self) -> _Layer:
        s = self.shape
        return _Layer(
            input_norm=self._plain(s.hidden_size),
            qkv=self._linear(s.q_size + 2 * s.kv_size, s.hidden_size, bias=s.qkv_bias),
            q_norm=self._plain(s.head_dim) if s.qk_norm else None,
            k_norm=self._plain(s.head_dim) if s.qk_norm else None,
            o=self._linear(s.hidden_size, s.q_size, bias=s.o_bias),
            post_norm=self._plain(s.hidden_size),
            gate_up=self._linear(2 * s.intermediate_size, s.hidden_size, bias=s.mlp_bias),
            down=self._linear(s.hidden_size, s.intermediate_size, bias=s.mlp_bias),
        )

    def _store(self) -> WeightStore:
        s = self.shape
        slots: dict[str, Slot] = {"model.embed_tokens.weight": Slot(self._embed, 0, s.vocab_size)}
        for i, layer in enumerate(self._layers):
            at = f"model.layers.{i}."
            slots[at + "input_layernorm.weight"] = Slot(layer.input_norm, 0, s.hidden_size)
            q_end, k_end = s.q_size, s.q_size + s.kv_size
            cuts = (("q_proj", 0, q_end), ("k_proj", q_end, k_end), ("v_proj", k_end, k_end + s.kv_size))
            slots |= _named(at + "self_attn.", layer.qkv, cuts)
            slots |= _named(at + "self_attn.", layer.o, (("o_proj", 0, s.hidden_size),))
            if layer.q_norm is not None and layer.k_norm is not None:
                slots[at + "self_attn.q_norm.weight"] = Slot(layer.q_norm, 0, s.head_dim)
                slots[at + "self_attn.k_norm.weight"] = Slot(layer.k_norm, 0, s.head_dim)
            slots[at + "post_attention_layernorm.weight"] = Slot(layer.post_norm, 0, s.hidden_size)
            middle = s.intermediate_size
            slots |= _named(at + "mlp.", layer.gate_up, (("gate_proj", 0, middle), ("up_proj", middle, 2 * middle)))
            slots |= _named(at + "mlp.", layer.down, (("down_proj", 0, s.hidden_size),))
        slots["model.norm.weight"] = Slot(self._norm, 0, s.hidden_size)
        if s.tied:
            return WeightStore(
                slots,
                tied=[(self._embed, self._head)],
                aliases={"lm_head.weight": "model.embed_tokens.weight"},
            )
        return WeightStore(slots | _named("", self._head, (("lm_head", 0, s.vocab_size),)))


def _named(prefix: str, linear: Linear, cuts: Sequence[tuple[str, int, int]]) -> dict[str, Slot]:
    slots = {f"{prefix}{name}.weight": Slot(linear, start, end) for name, start, end in cuts}
    if linear.bias is not None:
        slots |= {f"{prefix}{name}.bias": Slot(linear.bias, start, end) for name, start, end in cuts}
    return slots


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
