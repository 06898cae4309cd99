"""Choices of an engine for test rollouts, and what routers really choose.

Tokens are told apart by what they follow, which stays the same in whatever row they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.types import RolloutBatch

Context = tuple[int, ...]
"""All tokens of a sequence up to and with the one meant."""


@dataclass
class Choices:
    """Experts that each token went to, by layer and context, each time that a router ran."""

    scoring: dict[tuple[int, Context], list[frozenset[int]]] = field(default_factory=dict)
    training: dict[tuple[int, Context], list[frozenset[int]]] = field(default_factory=dict)

    def add(self, layer: int, contexts: Sequence[Context | None], chosen: Tensor, *, training: bool) -> None:
        table = self.training if training else self.scoring
        for context, row in zip(contexts, chosen, strict=True):
            if context is not None:
                table.setdefault((layer, context), []).append(frozenset(row.nonzero()[:, 0].tolist()))


@contextmanager
def watched_routers(worker: Any) -> Iterator[Choices]:
    """Record what the routers of a worker in this process choose; its rows are not split over ranks."""
    from slime.backends.megatron.layers import routers

    choices = Choices()
    rows: list[list[Context | None]] = []
    training = [False]

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        # One row after the other on one stage: a router that runs in a backward recomputes the last row.
        rows.append(contexts(args[0], args[1]))
        training[0] = torch.is_grad_enabled()

    def choose(layer: int) -> Any:
        return lambda module, args, output: choices.add(layer, rows[-1], output[1], training=training[0])

    handles = [chunk.register_forward_pre_hook(enter, with_kwargs=True) for chunk in worker.chunks]
    handles += [router.register_forward_hook(choose(layer)) for layer, router in routers(worker.chunks)]
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()


def contexts(tokens: Tensor, row: Any) -> list[Context | None]:
    """Context of every token of a whole row; None for padding."""
    ids = tokens[0].tolist()
    found: list[Context | None] = [None] * len(ids)
    for i, segment in enumerate(row.layout.segments):
        before: list[int] = []
        for j in row.layout.chain(i)[:-1]:
            before += ids[row.layout.segments[j].start : row.layout.segments[j].end]
        for k in range(segment.length):
            found[segment.start + k] = tuple(before + ids[segment.start : segment.start + k + 1])
    return found


def shift_routers(args: Any, rollout_id: int, step_id: int, chunks: Sequence[Any], *rest: Any) -> None:
    """A before-train-step hook that moves every router far enough to change many choices, alike on all ranks."""
    from slime.backends.megatron.layers import routers

    for layer, router in routers(chunks):
        generator = torch.Generator().manual_seed(100 * rollout_id + 10 * step_id + layer)
        router.weight.data += 0.3 * torch.randn(router.weight.shape, generator=generator).to(router.weight)


def with_planted_routes(
    batch: RolloutBatch, *, num_layers: int, num_experts: int, topk: int, dense: Sequence[int] = (), seed: int = 0
) -> RolloutBatch:
    """Random routes as an engine returns them: zeros in dense layers, one choice per context and layer."""
    rng = np.random.default_rng(seed)
    known: dict[Context, np.ndarray] = {}
    routes = []
    for tokens in batch.tokens:
        rows = np.zeros((len(tokens) - 1, num_layers, topk), dtype=np.int32)
        for t in range(len(tokens) - 1):
            context = tuple(tokens[: t + 1].tolist())
            if context not in known:
                known[context] = rng.random((num_layers, num_experts)).argsort(-1)[:, :topk].astype(np.int32)
                known[context][list(dense)] = 0
            rows[t] = known[context]
        routes.append(rows)
    return replace(batch, rollout_routed_experts=routes)


def with_kept_tokens(batch: RolloutBatch, *, vocab_size: int = 250, seed: int = 5) -> RolloutBatch:
    """Random sets that hold the drawn token; a fifth of the tokens, and one whole sample, have none."""
    rng = np.random.default_rng(seed)
    ids, offsets = [], []
    for tokens, length in zip(batch.tokens, batch.response_lengths, strict=True):
        rows = []
        for target in tokens[len(tokens) - length :]:
            others = rng.choice(vocab_size, size=rng.integers(0, 12), replace=False)
            rows.append(np.unique([*others, target]) if rng.random() > 0.2 else np.zeros(0, dtype=np.int64))
        ids.append(np.concatenate([np.zeros(0, dtype=np.int64), *rows]).astype(np.int32))
        offsets.append(np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32))
    ids[3], offsets[3] = ids[3][:0], np.zeros_like(offsets[3])
    return replace(batch, rollout_top_p_token_ids=ids, rollout_top_p_token_offsets=offsets)
