"""Homes of weights: plain tensors, and linear layers that keep theirs in the layout that multiplies fastest.

On a CPU with oneDNN a large weight is stored blocked, once: without that each call reorders it first, which costs more
than the product for the few rows of a decode step (float32 3x, bfloat16 1.5x on an AVX-512 machine). The blocked form
replaces the plain one, it is no second copy; ``dense`` gives back the exact values. Elsewhere the weight stays plain.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_FROM_ELEMENTS = 1 << 16
"""Below this a plain product is faster than the call overhead of the packed one."""
_PACK_ROWS = 32
"""Row count the layout is chosen for; it serves any other number of rows."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and machine have packed products for ``dtype``."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Plain:
    """A tensor that is used as it is stored: norms, biases, the embedding table."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._data: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Always true: ``dense`` is the stored tensor."""
        return True

    @property
    def data(self) -> Tensor:
        """The stored tensor."""
        assert self._data is not None, "the owner refuses to run without weights"
        return self._data

    def dense(self) -> Tensor:
        """The stored tensor, allocated on first use."""
        if self._data is None:
            self._data = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self._data

    def store(self, weight: Tensor) -> None:
        """Take over ``weight``."""
        self._data = weight

    def release(self) -> None:
        """Free the tensor."""
        self._data = None


class Linear:
    """``y = x W^T + b`` with ``W`` ``[out, in]``; the owner writes ``W`` through ``store``.

    Args:
        out_features: Rows of ``W``.
        in_features: Columns of ``W``.
        bias: Home of the bias, None for no bias.
        dtype: Of weight, bias, input and output.
        device: Where they live.
    """

    def __init__(
        self, out_features: int, in_features: int, *, bias: Plain | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = (out_features, in_features)
        self.dtype = dtype
        self.device = device
        self.bias = bias
        self._packs = out_features * in_features >= _PACK_FROM_ELEMENTS and can_pack(dtype, device)
        self._weight: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[M, in]`` to ``[M, out]``."""
        weight = self._weight
        assert weight is not None, "the owner refuses to run without weights"
        bias = self.bias.data if self.bias is not None else None
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)

    @property
    def is_plain(self) -> bool:
        """Whether ``dense`` is the stored tensor itself, so that writing into it is enough."""
        return not self._packs

    def dense(self) -> Tensor:
        """The weight as ``[out, in]``: the stored tensor if plain, else its values in a new one."""
        if self._weight is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self._weight.to_dense() if self._packs else self._weight

    def store(self, weight: Tensor) -> None:
        """Take over ``weight`` ``[out, in]``; it may be aliased when plain."""
        if self._packs:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        else:
            self._weight = weight

    def release(self) -> None:
        """Free the weight."""
        self._weight = None


class Homes:
    """Makes homes of one dtype on one device.

    Args:
        dtype: Of weights and activations.
        device: Where they live.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def plain(self, *shape: int, dtype: torch.dtype | None = None) -> Plain:
        """A tensor that is used as it is stored, in another dtype if one is given."""
        return Plain(*shape, dtype=dtype or self.dtype, device=self.device)

    def linear(self, out_features: int, in_features: int, *, bias: bool = False) -> Linear:
        """A linear layer."""
        home = self.plain(out_features) if bias else None
        return Linear(out_features, in_features, bias=home, dtype=self.dtype, device=self.device)
