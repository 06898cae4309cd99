"""Attention of a packed row by one call of torch's variable-length flash attention: CUDA, half precision.

A piece is a run of queries of one segment with all keys it may see: those of its prefixes, then its own
up to its last query. Flash attention aligns its causal mask at the end of the keys, which is what a
piece needs, and lets query heads share keys. Tests (on a GPU) hold: output and gradients agree with SDPA
under the full mask.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from slime.backends.megatron.layout import PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Queries and keys, as tokens of the row."""

    queries: torch.Tensor  # [q] int64, consecutive
    keys: torch.Tensor  # [k] int64, k >= q


class VarlenPlan:
    """The pieces of one row, or of one context-parallel rank's share of it.

    Args:
        layout: The whole row.
        index: ``[T / cp]`` the row's tokens of this rank, in the order of the queries.
        gathered: ``[T]`` the row's tokens in the order of the keys.
        device: The GPU.
    """

    def __init__(
        self, layout: PackedLayout, index: torch.Tensor, gathered: torch.Tensor, *, device: torch.device
    ) -> None:
        pieces = list(_pieces(layout, index))
        local = torch.full((layout.num_tokens,), -1, dtype=torch.int64)
        local[index] = torch.arange(index.numel())
        place = torch.empty(layout.num_tokens, dtype=torch.int64)
        place[gathered] = torch.arange(gathered.numel())
        queries = torch.cat([local[p.queries] for p in pieces]) if pieces else local[:0]
        keys = torch.cat([place[p.keys] for p in pieces]) if pieces else local[:0]
        self.num_queries = index.numel()
        # None: all tokens in their order, nothing to gather or to scatter.
        self.queries = None if torch.equal(queries, torch.arange(index.numel())) else queries.to(device)
        self.keys = None if torch.equal(keys, torch.arange(gathered.numel())) else keys.to(device)
        self.cu_queries, self.max_queries = _cumulative([p.queries.numel() for p in pieces], device)
        self.cu_keys, self.max_keys = _cumulative([p.keys.numel() for p in pieces], device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, dropout: float = 0.0
    ) -> torch.Tensor:
        """As ``PaddedPlan.attend``; there is no dropout in this kernel.

        The kernel has one head size: narrower heads, the values of multi-latent attention, are padded.
        """
        if not self.max_queries:
            # Padding only, as a short row has on some context-parallel rank, and the kernel wants a sequence. All
            # three stay in the graph: the backward of the keys' gather is collective.
            nothing = query[:0].sum() + key[:0].sum() + value[:0].sum()
            return nothing.expand(*query.shape[:2], value.size(-1))
        from torch.nn.attention.varlen import varlen_attn  # has no CPU implementation; absent before torch 2.10

        assert not dropout, "variable-length attention has no dropout"
        if self.keys is not None:
            key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
        picked = query if self.queries is None else query.index_select(0, self.queries)
        width = max(query.size(-1), value.size(-1))
        picked, key, padded = (_widened(x, width) for x in (picked, key, value))
        output = varlen_attn(
            picked,
            key,
            padded,
            self.cu_queries,
            self.cu_keys,
            self.max_queries,
            self.max_keys,
            scale=scale,
            window_size=(-1, 0),
            **_grouped(varlen_attn),
        )[..., : value.size(-1)]
        if self.queries is None:
            return output
        return output.new_zeros(query.size(0), *output.shape[1:]).index_copy(0, self.queries, output)


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros behind each head; padding by nothing would copy."""
    return x if x.size(-1) == width else F.pad(x, (0, width - x.size(-1)))


def _grouped(varlen_attn: Callable[..., torch.Tensor]) -> dict[str, bool]:
    """What lets several query heads share keys: later versions of torch want it said, earlier ones just do it."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _pieces(layout: PackedLayout, index: torch.Tensor) -> Iterator[Piece]:
    ids = layout.segment_ids()[index]
    same = torch.zeros(index.numel(), dtype=torch.bool)
    same[1:] = (ids[1:] == ids[:-1]) & (index[1:] == index[:-1] + 1)
    starts = (~same).nonzero().view(-1).tolist()
    for start, end in zip(starts, [*starts[1:], index.numel()], strict=True):
        segment_id = int(ids[start])
        if segment_id < 0:
            continue
        first, last = int(index[start]), int(index[end - 1])
        before = [layout.segments[i] for i in layout.chain(segment_id)[:-1]]
        own = torch.arange(layout.segments[segment_id].start, last + 1)
        keys = torch.cat([*(torch.arange(s.start, s.end) for s in before), own])
        yield Piece(queries=torch.arange(first, last + 1), keys=keys)


def _cumulative(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, int]:
    total = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    total[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return total.to(device), max(lengths, default=0)
