"""Latent attention (https://arxiv.org/abs/2405.04434, section 2.1): projections of the DeepSeek-V3 kind.

Of every token only the latent vector and the rotated channels that all heads share are kept. The matrices that would
expand the latent to keys and values are applied to the queries and to the result instead, so attention runs over one
key head of ``kv_rank + rope_dim`` channels whose first ``kv_rank`` are the value. Tests hold: results equal those of
the expanded form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.engines.embedded.linear import Homes
from slime.engines.embedded.norm import Norm
from slime.engines.embedded.rope import rotate
from slime.engines.embedded.shape import ModelShape
from slime.engines.embedded.weights import Slot, named_rows

_LATENT_EPS = 1e-6
"""The norms of the latents do not follow ``rms_norm_eps`` in the models' own code."""


class LatentAttention:
    """Projections around the attention of one layer.

    Args:
        shape: Sizes and switches.
        homes: Makes the weights.
    """

    def __init__(self, shape: ModelShape, homes: Homes) -> None:
        assert shape.latent is not None, "only models with latent attention are built with it"
        self._sizes = s = shape.latent
        self._num_heads = shape.num_heads
        hidden, q_size = shape.hidden_size, shape.num_heads * (s.nope_dim + s.rope_dim)
        self._q_a = homes.linear(s.q_rank, hidden, bias=shape.qkv_bias) if s.q_rank else None
        self._q_norm = Norm(s.q_rank, _LATENT_EPS, homes) if s.q_rank else None
        self._q = homes.linear(q_size, s.q_rank or hidden)
        self._kv_a = homes.linear(s.kv_rank + s.rope_dim, hidden, bias=shape.qkv_bias)
        self._kv_norm = Norm(s.kv_rank, _LATENT_EPS, homes)
        self._kv_b = homes.plain(shape.num_heads * (s.nope_dim + s.value_dim), s.kv_rank)
        self._o = homes.linear(hidden, shape.num_heads * s.value_dim, bias=shape.o_bias)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[T, heads, D]``, keys ``[T, 1, D]`` and, a part of them, values of ``x`` ``[T, H]``."""
        s = self._sizes
        compressed = x if self._q_a is None or self._q_norm is None else self._q_norm(self._q_a(x))
        q = self._q(compressed).view(x.shape[0], self._num_heads, s.nope_dim + s.rope_dim)
        q_nope, q_rope = q.split((s.nope_dim, s.rope_dim), -1)
        latent, k_rope = self._kv_a(x).split((s.kv_rank, s.rope_dim), -1)
        q_rope = rotate(self._paired(q_rope), cos, sin)
        k_rope = rotate(self._paired(k_rope[:, None]), cos, sin)
        k = torch.cat((self._kv_norm(latent)[:, None], k_rope), -1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self._expansion[:, : s.nope_dim]).transpose(0, 1)
        return torch.cat((q_latent, q_rope), -1), k, k[..., : s.kv_rank]

    def output(self, mixed: Tensor) -> Tensor:
        """``[T, H]`` of attention results ``[T, heads * kv_rank]``."""
        latent = mixed.view(mixed.shape[0], self._num_heads, -1).transpose(0, 1)
        values = torch.bmm(latent, self._expansion[:, self._sizes.nope_dim :].transpose(1, 2))
        return self._o(values.transpose(0, 1).reshape(mixed.shape[0], -1))

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Where each named weight lives."""
        slots = named_rows(prefix, self._kv_a, {"kv_a_proj_with_mqa": None})
        slots |= self._kv_norm.slots(prefix + "kv_a_layernorm")
        slots[prefix + "kv_b_proj.weight"] = Slot(self._kv_b, 0, self._kv_b.shape[0])
        slots |= named_rows(prefix, self._o, {"o_proj": None})
        if self._q_a is None or self._q_norm is None:
            return slots | named_rows(prefix, self._q, {"q_proj": None})
        slots |= named_rows(prefix, self._q_a, {"q_a_proj": None}) | self._q_norm.slots(prefix + "q_a_layernorm")
        return slots | named_rows(prefix, self._q, {"q_b_proj": None})

    @property
    def _expansion(self) -> Tensor:
        """Per head, the rows that expand a latent to a key and then to a value: ``[heads, nope + value, kv_rank]``."""
        return self._kv_b.data.view(self._num_heads, -1, self._sizes.kv_rank)

    def _paired(self, x: Tensor) -> Tensor:
        """Channels in the order that ``rotate`` turns: the first of every pair, then the second ones."""
        return torch.cat((x[..., 0::2], x[..., 1::2]), -1) if self._sizes.interleaved else x
