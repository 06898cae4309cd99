"""What is kept of every token that was run: keys, values, and the experts it was sent to.

Latent attention keeps one vector per token that serves as key and, in its first part, as value. Tests hold: copies
carry all of it, whatever the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Sizes of what is kept, and how it is attended to.

    Args:
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: Key heads; a divisor of ``num_heads``.
        key_dim: Width of a key.
        value_dim: Width of a value.
        scale: Factor of the scores.
        values_in_keys: Whether a value is the first ``value_dim`` channels of its key.
        num_routes: Experts per token and layer; 0 for a model without experts.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    values_in_keys: bool = False
    num_routes: int = 0

    @property
    def heads_per_key(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Memory of one token."""
        width = self.key_dim + (0 if self.values_in_keys else self.value_dim)
        return self.num_layers * (self.num_kv_heads * width * dtype.itemsize + self.num_routes * ROUTE_DTYPE.itemsize)

    def allocate(self, tokens: int, *, rows: int | None, dtype: torch.dtype, device: torch.device) -> KvBlock:
        """Zeroed memory for ``rows`` sequences, or for one without a dimension for rows if None.

        Zeros, not empty: a masked position must hold a finite value, or 0 * NaN reaches the result.
        """
        lead = () if rows is None else (rows,)
        size = (self.num_layers, *lead, self.num_kv_heads, tokens)
        k = torch.zeros((*size, self.key_dim), dtype=dtype, device=device)
        v = None if self.values_in_keys else torch.zeros((*size, self.value_dim), dtype=dtype, device=device)
        routes = None
        if self.num_routes:
            routes = torch.zeros((*lead, tokens, self.num_layers, self.num_routes), dtype=ROUTE_DTYPE, device=device)
        return KvBlock(k, v, routes, self.value_dim)


ROUTE_DTYPE = torch.int16


@dataclass(eq=False, slots=True)
class KvBlock:
    """Memory of some sequences, or of one; every method gives a view.

    Args:
        k: ``[layers, (rows,) kv heads, tokens, key_dim]``.
        own_v: ``[layers, (rows,) kv heads, tokens, value_dim]``; None where values are part of the keys.
        routes: ``[(rows,) tokens, layers, routes]`` expert ids, 0 in dense layers; None without experts.
        value_dim: Width of a value.
    """

    k: Tensor
    own_v: Tensor | None
    routes: Tensor | None
    value_dim: int

    @property
    def v(self) -> Tensor:
        """Values, in the layout of ``k``."""
        return self.k[..., : self.value_dim] if self.own_v is None else self.own_v

    @property
    def num_rows(self) -> int:
        """Sequences there is memory for."""
        return self.k.shape[1]

    def first_rows(self, count: int) -> KvBlock:
        """The first ``count`` sequences."""
        v = None if self.own_v is None else self.own_v[:, :count]
        return KvBlock(self.k[:, :count], v, None if self.routes is None else self.routes[:count], self.value_dim)

    def row(self, index: int) -> KvBlock:
        """One sequence."""
        v = None if self.own_v is None else self.own_v[:, index]
        return KvBlock(self.k[:, index], v, None if self.routes is None else self.routes[index], self.value_dim)

    def span(self, start: int, end: int) -> KvBlock:
        """Tokens ``[start, end)`` of one sequence."""
        v = None if self.own_v is None else self.own_v[:, :, start:end]
        routes = None if self.routes is None else self.routes[start:end]
        return KvBlock(self.k[:, :, start:end], v, routes, self.value_dim)

    def copy_(self, source: KvBlock) -> None:
        """Take over all that ``source``, of the same sizes, holds."""
        self.k.copy_(source.k)
        if self.own_v is not None and source.own_v is not None:
            self.own_v.copy_(source.own_v)
        if self.routes is not None and source.routes is not None:
            self.routes.copy_(source.routes)

    def clone(self) -> KvBlock:
        """The same in memory of its own."""
        v = None if self.own_v is None else self.own_v.clone()
        return KvBlock(self.k.clone(), v, None if self.routes is None else self.routes.clone(), self.value_dim)
