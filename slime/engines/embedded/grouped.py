"""Attention whose query heads share key heads in groups: projections of the Llama, Qwen2 and Qwen3 kind."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.engines.embedded.linear import Homes
from slime.engines.embedded.norm import Norm
from slime.engines.embedded.rope import rotate
from slime.engines.embedded.shape import ModelShape
from slime.engines.embedded.weights import Slot, named_rows


class GroupedAttention:
    """Projections around the attention of one layer.

    Args:
        shape: Sizes and switches.
        homes: Makes the weights.
    """

    def __init__(self, shape: ModelShape, homes: Homes) -> None:
        self._shape = shape
        self._qkv = homes.linear(shape.q_size + 2 * shape.kv_size, shape.hidden_size, bias=shape.qkv_bias)
        self._o = homes.linear(shape.hidden_size, shape.q_size, bias=shape.o_bias)
        self._q_norm = Norm(shape.head_dim, shape.rms_norm_eps, homes) if shape.qk_norm else None
        self._k_norm = Norm(shape.head_dim, shape.rms_norm_eps, homes) if shape.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[T, heads, D]``, keys and values ``[T, kv heads, D]`` of ``x`` ``[T, H]``."""
        shape = self._shape
        heads = self._qkv(x).view(x.shape[0], -1, shape.head_dim)
        rotated, v = heads[:, : -shape.num_kv_heads], heads[:, -shape.num_kv_heads :]
        if self._q_norm is not None and self._k_norm is not None:
            rotated = torch.cat(
                (self._q_norm(rotated[:, : shape.num_heads]), self._k_norm(rotated[:, shape.num_heads :])), dim=1
            )
        rotated = rotate(rotated, cos, sin)
        return rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], v

    def output(self, mixed: Tensor) -> Tensor:
        """``[T, H]`` of attention results ``[T, heads * D]``."""
        return self._o(mixed)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Where each named weight lives."""
        q_end, k_end = self._shape.q_size, self._shape.q_size + self._shape.kv_size
        cuts = {"q_proj": (0, q_end), "k_proj": (q_end, k_end), "v_proj": (k_end, k_end + self._shape.kv_size)}
        slots = named_rows(prefix, self._qkv, cuts) | named_rows(prefix, self._o, {"o_proj": None})
        if self._q_norm is not None and self._k_norm is not None:
            slots |= self._q_norm.slots(prefix + "q_norm") | self._k_norm.slots(prefix + "k_norm")
        return slots
