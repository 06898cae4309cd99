"""Attention over cached keys and values: prompts being computed, and rows being extended by one token.

A decode step treats the query heads that share a key head as the rows of one small product, so keys and values are
read once. Rows that share a prompt attend to it together, in one product per group, and to their own tokens
separately; the two results are joined by their log-sum-exp. Tests hold: every path equals plain attention in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.engines.embedded.cache import Row, Slab
from slime.engines.embedded.kv import CacheShape
from slime.engines.embedded.prefix import PrefixEntry


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens ``[start, end)`` of a prompt, computed in this step."""

    entry: PrefixEntry
    start: int
    end: int


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention with its log-sum-exp.

    Args:
        q: ``[B, H, M, D]`` queries.
        k: ``[B, H, T, D]`` keys; may be strided over T.
        v: ``[B, H, T, E]`` values.
        mask: ``[B, 1, M, T]`` or broadcastable, added to the scores.
        scale: Factor of the scores.

    Returns:
        ``[B, H, M, E]`` in the dtype of ``q`` and ``[B, H, M]`` float32.
    """
    if q.device.type == "cpu" and q.dtype is not torch.float32 and q.shape[-1] == v.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
        return out, lse
    scores = torch.matmul(q, k.transpose(2, 3)).float().mul_(scale).add_(mask)
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v), lse


class _SlabStep:
    """One slab's part of a decode step: everything that is the same in all layers."""

    def __init__(self, slab: Slab, offset: int, shape: CacheShape) -> None:
        count = len(slab.rows)
        device, dtype = slab.kv.k.device, slab.kv.k.dtype
        self.slab = slab
        self.count = count
        self.rows = slice(offset, offset + count)
        self.index = torch.arange(count, device=device)
        self.lengths = torch.tensor([row.length for row in slab.rows], device=device)
        self.width = int(max(row.length for row in slab.rows)) + 1
        hidden = torch.arange(self.width, device=device)[None, :] > self.lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        repeat = shape.heads_per_key
        self.mask = mask[:, None, None, :].expand(count, 1, repeat, self.width)
        self.is_exact = device.type == "cpu" and dtype is torch.float32
        if self.is_exact:
            full = mask[:, None, None, :].expand(count, shape.num_kv_heads, repeat, self.width)
            self.bias = full.reshape(count * shape.num_kv_heads, repeat, self.width)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Append this step's keys and values ``[rows, kv heads, D]``."""
        kv = self.slab.kv
        kv.k[layer][self.index, :, self.lengths] = k
        if kv.own_v is not None:
            kv.own_v[layer][self.index, :, self.lengths] = v

    def attend(self, layer: int, q: Tensor, scale: float, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Attend over the rows' own tokens; ``q`` ``[rows, kv heads, M, D]``."""
        k = self.slab.kv.k[layer, : self.count, :, : self.width]
        v = self.slab.kv.v[layer, : self.count, :, : self.width]
        if not self.is_exact:
            return attend(q, k, v, self.mask, scale)
        # In float32 two batched products beat the fused kernel on a CPU by a quarter for these few queries.
        flat = q.reshape(-1, q.shape[2], q.shape[3])
        scores = torch.baddbmm(self.bias, flat, k.flatten(0, 1).transpose(1, 2), alpha=scale)
        lse = torch.logsumexp(scores, -1).view(q.shape[:3]) if with_lse else None
        return torch.bmm(torch.softmax(scores, -1), v.flatten(0, 1)).view(*q.shape[:3], v.shape[-1]), lse


class DecodeAttention:
    """Attention of one decode step over all live rows.

    The order of the rows of the step is that of ``rows``: slab by slab.
    """

    def __init__(self, slabs: Sequence[Slab], shape: CacheShape) -> None:
        self._shape = shape
        self.rows: list[Row] = []
        self._parts: list[_SlabStep] = []
        for slab in slabs:
            if slab.rows:
                self._parts.append(_SlabStep(slab, len(self.rows), shape))
                self.rows.extend(slab.rows)
        groups: dict[tuple[int, int], tuple[PrefixEntry, list[int]]] = {}
        for i, row in enumerate(self.rows):
            if row.shared is not None:
                key = (id(row.shared), row.shared_length)
                groups.setdefault(key, (row.shared, []))[1].append(i)
        self._groups = [(entry, key[1], members) for key, (entry, members) in groups.items()]
        device = slabs[0].kv.k.device if slabs else torch.device("cpu")
        members = [i for _, _, group in self._groups for i in group]
        self._shared_rows = torch.tensor(members, dtype=torch.long, device=device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append ``k`` ``[B, kv heads, D]`` and ``v`` ``[B, kv heads, E]``, and attend with ``q`` ``[B, heads, D]``.

        Returns:
            ``[B, heads * E]``.
        """
        shape = self._shape
        q = q.reshape(q.shape[0], shape.num_kv_heads, -1, shape.key_dim)
        outputs: list[Tensor] = []
        sums: list[Tensor] = []
        for part in self._parts:
            part.write(layer, k[part.rows], v[part.rows])
            out, lse = part.attend(layer, q[part.rows], shape.scale, bool(self._groups))
            outputs.append(out)
            if self._groups and lse is not None:
                sums.append(lse)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self._groups:
            out = self._add_shared(layer, q, out, sums[0] if len(sums) == 1 else torch.cat(sums))
        return out.reshape(out.shape[0], -1)

    def keep_routes(self, routes: Tensor) -> None:
        """Store the experts ``[B, layers, routes]`` of this step's tokens."""
        for part in self._parts:
            target = part.slab.kv.routes
            assert target is not None, "a model with experts keeps their ids"
            target[part.index, part.lengths] = routes[part.rows].to(target.dtype)

    def _add_shared(self, layer: int, q: Tensor, own: Tensor, own_lse: Tensor) -> Tensor:
        """Join attention to the shared prompts with that to the rows' own tokens."""
        chosen = q[self._shared_rows]
        outputs: list[Tensor] = []
        sums: list[Tensor] = []
        start = 0
        for entry, length, members in self._groups:
            group = chosen[start : start + len(members)]
            start += len(members)
            heads, repeat, dim = group.shape[1:]
            joint = group.transpose(0, 1).reshape(1, heads, len(members) * repeat, dim)
            k, v = entry.kv.k[None, layer, :, :length], entry.kv.v[None, layer, :, :length]
            mask = torch.zeros(1, 1, 1, 1, dtype=q.dtype, device=q.device).expand(1, 1, joint.shape[2], length)
            out, lse = attend(joint, k, v, mask, self._shape.scale)
            outputs.append(out.view(heads, len(members), repeat, -1).transpose(0, 1))
            sums.append(lse.view(heads, len(members), repeat).transpose(0, 1))
        shared, shared_lse = torch.cat(outputs), torch.cat(sums)
        weight = torch.sigmoid(shared_lse - own_lse[self._shared_rows]).unsqueeze(-1)
        joined = torch.lerp(own[self._shared_rows].float(), shared.float(), weight)
        out = own.clone()
        out[self._shared_rows] = joined.to(own.dtype)
        return out


class PromptAttention:
    """Attention of the prompt chunks of one step; chunk by chunk in the order given."""

    def __init__(self, chunks: Sequence[PromptChunk], shape: CacheShape) -> None:
        self._chunks = chunks
        self._shape = shape
        self._masks: list[Tensor | None] = []
        self._rows: list[slice] = []
        done = 0
        for chunk in chunks:
            self._rows.append(slice(done, done + chunk.end - chunk.start))
            done += chunk.end - chunk.start
            if chunk.start == 0:
                self._masks.append(None)
                continue
            device, dtype = chunk.entry.kv.k.device, chunk.entry.kv.k.dtype
            columns = torch.arange(chunk.end, device=device)
            hidden = columns[None, :] > columns[chunk.start :, None]
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=device)
            self._masks.append(zeros.masked_fill_(hidden, float("-inf")))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store ``k`` ``[T, kv heads, D]`` and ``v`` ``[T, kv heads, E]``; attend causally: ``q`` ``[T, heads, D]``.

        Returns:
            ``[T, heads * E]``.
        """
        outputs: list[Tensor] = []
        for chunk, rows, mask in zip(self._chunks, self._rows, self._masks, strict=True):
            kv = chunk.entry.kv
            kv.k[layer, :, chunk.start : chunk.end] = k[rows].transpose(0, 1)
            if kv.own_v is not None:
                kv.own_v[layer, :, chunk.start : chunk.end] = v[rows].transpose(0, 1)
            keys, values = self._per_head(kv.k[layer, :, : chunk.end]), self._per_head(kv.v[layer, :, : chunk.end])
            queries = q[rows].transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=self._shape.scale
            )
            outputs.append(out[0].transpose(0, 1).reshape(chunk.end - chunk.start, -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def keep_routes(self, routes: Tensor) -> None:
        """Store the experts ``[T, layers, routes]`` of the chunks' tokens."""
        for chunk, rows in zip(self._chunks, self._rows, strict=True):
            target = chunk.entry.kv.routes
            assert target is not None, "a model with experts keeps their ids"
            target[chunk.start : chunk.end] = routes[rows].to(target.dtype)

    def _per_head(self, shared: Tensor) -> Tensor:
        """``[1, heads, T, D]`` of ``[kv heads, T, D]``; without a copy if there is one key head."""
        if shared.shape[0] == 1:
            return shared.expand(self._shape.num_heads, -1, -1)[None]
        return shared.repeat_interleave(self._shape.heads_per_key, 0)[None]
