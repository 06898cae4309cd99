"""Attention of a packed row as a few padded batches of SDPA calls: for CPUs and for fp32.

Segments of similar length are padded to one another and attended together. Without a prefix the call
is causal and needs no mask, because padding stands right of every real query; with one, a bias hides
the padding of the prefix. Cost grows with the squares of segment lengths, not with the square of the
row. Tests hold: output and gradients equal those of one SDPA call with the full mask.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from slime.backends.megatron.layout import PackedLayout

# Segments share a batch when each has at least this share of the longest one's tokens, or misses it by
# fewer than SLACK_TOKENS: padding costs arithmetic, another batch costs calls.
MIN_FILL = 0.8
SLACK_TOKENS = 16


class _Permute(torch.autograd.Function):
    """Rows of a tensor picked by ``index``, where -1 means a row of zeros.

    Every row is picked at most once, as slot ``inverse`` (-1: nowhere), so that the backward is a pick
    too; index_add, autograd's own way, goes row by row on a CPU.
    """

    @staticmethod
    def forward(ctx, source: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return _pick(source, index)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        return _pick(grads[0], ctx.inverse), None, None


def _pick(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    picked = source.index_select(0, index.clamp(min=0))
    return picked.masked_fill_((index < 0).view(-1, *[1] * (source.dim() - 1)), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Where the tokens of a row ``[T]`` go in ``[S]`` padded slots, each at most once.

    ``index`` ``[S]`` is the token of each slot (-1: padding), ``inverse`` ``[T]`` the slot of each token.
    """

    index: torch.Tensor
    inverse: torch.Tensor
    identity: bool

    @classmethod
    def of(cls, layout: PackedLayout, batches: Sequence[Sequence[int]], device: torch.device) -> "Slots":
        """One padded block after the other, each holding the segments of one batch."""
        blocks = []
        for batch in batches:
            block = torch.full((len(batch), max(layout.segments[i].length for i in batch)), -1, dtype=torch.int64)
            for row, i in zip(block, batch, strict=True):
                segment = layout.segments[i]
                row[: segment.length] = torch.arange(segment.start, segment.end)
            blocks.append(block.view(-1))
        index = torch.cat(blocks) if blocks else torch.zeros(0, dtype=torch.int64)
        slots = (index >= 0).nonzero().view(-1)
        inverse = torch.full((layout.num_tokens,), -1, dtype=torch.int64)
        inverse[index[slots]] = slots
        identity = torch.equal(index, torch.arange(layout.num_tokens))
        return cls(index=index.to(device), inverse=inverse.to(device), identity=identity)

    def pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[T, h, d]`` -> ``[S, h, d]``."""
        return tokens if self.identity else _Permute.apply(tokens, self.index, self.inverse)

    def unpad(self, slots: torch.Tensor) -> torch.Tensor:
        """``[S, ...]`` -> ``[T, ...]``; tokens without a slot become zero."""
        return slots if self.identity else _Permute.apply(slots, self.inverse, self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """One level of prefixes of a batch: each distinct prefix padded once, then repeated."""

    slots: Slots
    count: int
    rows: torch.Tensor  # [B]: the prefix of each segment of the batch

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[T, h, d]`` -> ``[B, P, h, d]``."""
        padded = self.slots.pad(tokens).view(self.count, -1, *tokens.shape[1:])
        return padded.index_select(0, self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Segments attended in one call: B of them, padded to Q queries and K keys."""

    size: int
    length: int
    levels: tuple[Prefixes, ...]  # the root's first
    bias: torch.Tensor | None  # [1 or B, 1, Q, K], 0 or -inf


class PaddedPlan:
    """What the attention layers share for one row: computed once, used by every layer.

    Args:
        layout: The whole row; it is not split over context-parallel ranks.
        dtype: That of queries and keys.
        device: Where they are.
    """

    def __init__(self, layout: PackedLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        batches = tuple(_batches(layout))
        self.slots = Slots.of(layout, batches, device)
        self.batches = tuple(_batch(layout, members, dtype, device) for members in batches)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Attention of a row.

        Args:
            query: ``[T, h, d]``.
            key: ``[T, g, d]``; h is a multiple of g.
            value: ``[T, g, v]``.
            scale: Factor of the scores.
            dropout: Probability with which an attention weight is dropped.

        Returns:
            ``[T, h, v]``; zero at padding.
        """
        if not self.batches:  # padding only; still part of the graph, so that a backward can run
            return (query.sum(-1, keepdim=True) * 0.0).expand(-1, -1, value.size(-1))
        sizes = [batch.size * batch.length for batch in self.batches]
        padded = [self.slots.pad(x).split(sizes) for x in (query, key, value)]
        outputs = []
        for batch, q, k, v in zip(self.batches, *padded, strict=True):
            q, k, v = (x.view(batch.size, batch.length, *x.shape[1:]) for x in (q, k, v))
            if batch.levels:
                k = torch.cat([*(level.gather(key) for level in batch.levels), k], 1)
                v = torch.cat([*(level.gather(value) for level in batch.levels), v], 1)
            output = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=batch.bias,
                is_causal=batch.bias is None,
                dropout_p=dropout,
                scale=scale,
                enable_gqa=q.size(2) != k.size(2),
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return self.slots.unpad(torch.cat(outputs))


def _batches(layout: PackedLayout) -> Iterator[list[int]]:
    """Segments that are attended together: equally many prefixes, similar lengths."""
    keys = {i: (len(layout.chain(i)), layout.segments[i].length) for i in range(len(layout.segments))}
    batch: list[int] = []
    # Longest first within a depth; equal lengths in the order of the row, which makes a row of equal
    # sequences one batch without any copy.
    for i in sorted(keys, key=lambda i: (keys[i][0], -keys[i][1], layout.segments[i].start)):
        depth, length = keys[i]
        if length == 0:
            continue
        if batch:
            first_depth, longest = keys[batch[0]]
            if depth != first_depth or length < min(MIN_FILL * longest, longest - SLACK_TOKENS):
                yield batch
                batch = []
        batch.append(i)
    if batch:
        yield batch


def _batch(layout: PackedLayout, members: list[int], dtype: torch.dtype, device: torch.device) -> Batch:
    lengths = [layout.segments[i].length for i in members]
    chains = [layout.chain(i)[:-1] for i in members]
    levels: list[Prefixes] = []
    hidden: list[torch.Tensor] = []  # per level [B, P]: slots of the prefix that are padding
    for prefixes in zip(*chains, strict=True):
        distinct = sorted(set(prefixes))
        rows = torch.tensor([distinct.index(p) for p in prefixes])
        slots = Slots.of(layout, [distinct], device)
        levels.append(Prefixes(slots=slots, count=len(distinct), rows=rows.to(device)))
        own = torch.tensor([layout.segments[p].length for p in prefixes])
        hidden.append(torch.arange(int(own.max()))[None] >= own[:, None])
    if not levels:
        return Batch(size=len(members), length=max(lengths), levels=(), bias=None)
    return Batch(
        size=len(members), length=max(lengths), levels=tuple(levels), bias=_bias(hidden, max(lengths), dtype, device)
    )


def _bias(hidden: list[torch.Tensor], length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    padding = torch.cat(hidden, 1)
    if bool((padding == padding[:1]).all()):
        padding = padding[:1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.cat([padding[:, None].expand(-1, length, -1), later[None].expand(padding.size(0), -1, -1)], 2)
    bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask, -torch.inf)
    return bias[:, None].to(device)
