"""The experts that tokens went to in one pass, used again in others.

Two passes over the same tokens with the same weights may route a token near a tie to different experts,
and so may two engines: log-probs then differ for no reason that the policy has. Here the choice of
experts is data: recorded in the old-policy pass, or found by the engine that sampled
(https://arxiv.org/abs/2510.11370), and replayed in training. Only the choice is replayed. With I the
replayed set of a token and s its present router scores, the gates are what Megatron makes of s over I,
e.g. exp(s_i) / sum over j in I of exp(s_j), so the router keeps learning through them.

Owns the hook in the routers and when it records or replays; ``route_table`` owns the ids. Tests hold:
training uses exactly the recorded ids, under any packing, split of the row and recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from slime.backends.megatron.batches import MicroBatch
from slime.backends.megatron.layers import routers
from slime.backends.megatron.layout import context_parallel_index
from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.route_table import RouteShape, RouteTable, check_routes
from slime.config import Config
from slime.types import RolloutBatch

Source = Literal["log_prob_pass", "engine"]
TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True)
class _RowRoutes:
    """Routes of the tokens of one row that this rank's routers see.

    Args:
        given: ``[n, layers, k]`` expert ids to use; None records instead.
        known: ``[n]`` bool tokens that have given ids; None when all have. The others (padding, tokens that
            the engine never ran) are routed by the router's own choice, and nothing depends on them.
        found: Layer slot to the ``[n, k]`` ids that it recorded.
    """

    given: Tensor | None
    known: Tensor | None = None
    found: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def choose(self, slot: int, own: Callable[[], Tensor]) -> Tensor:
        """``[n, k]`` int64 expert ids for one layer."""
        if self.given is None:
            ids = own()
            self.found[slot] = ids
            return ids
        ids = self.given[:, slot].long()
        return ids if self.known is None else torch.where(self.known[:, None], ids, own())


class _RouterHook:
    """Stands where a Megatron router expects its ``RouterReplay``.

    Megatron's own class keeps all routers of the process in one class-level list and hands recomputation
    its ids first in, first out. This worker may hold several models, sees tokens in different rows when
    recording and replaying, and runs other micro-batches between a forward and its recomputation.
    """

    def __init__(self, replay: RoutingReplay, slot: int) -> None:
        self._replay, self._slot = replay, slot

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores ``[n, k]`` and experts ``[n, k]`` chosen from ``[n, E]``; the call is Megatron's."""
        assert default_compute_topk is not None
        row = self._replay.row
        if row is None:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        def own() -> Tensor:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]

        # Gathered in one place for recording and replaying, so that sums run over experts in the same order.
        ids = row.choose(self._slot, own)
        return scores.gather(1, ids), ids


class RoutingReplay:
    """Routing replay of one model on one rank.

    A model without replay has one as well, with ``source`` None, and then nothing happens.

    Args:
        chunks: The model.
        parallel: This rank's place.
        shape: The model's routes.
        source: Where the replayed routes come from.
        sequence_parallel: Whether tensor-parallel ranks split the tokens.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        parallel: ParallelState,
        *,
        shape: RouteShape | None = None,
        source: Source | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        self._parallel, self._source = parallel, source
        self._split = parallel.tp_size if sequence_parallel else 1
        self._table: RouteTable | None = None
        self._mode: Literal["off", "record", "replay"] = "off"
        self.row: _RowRoutes | None = None
        """Routes of the row that is now in the model."""
        self._shape = shape
        self.layers: tuple[int, ...] = ()
        """Global numbers, from 0, of this rank's layers with a router; a slot is a place among them."""
        if source is not None:
            found = list(routers(chunks))
            self.layers = tuple(layer for layer, _ in found)
            for slot, (_, router) in enumerate(found):
                router.router_replay = _RouterHook(self, slot)

    def check(self, batch: RolloutBatch) -> None:
        """Raise DataError if a sample lacks routes that are to be replayed, or has some of another shape."""
        if self._source == "engine":
            assert self._shape is not None
            check_routes(batch, self._shape)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Around the training of one rollout: frees its routes."""
        try:
            yield
        finally:
            self._table = None

    def take(self, batch: RolloutBatch, samples: Sequence[int]) -> None:
        """Make room for the routes of this rank's samples, and fill in what the engine found.

        Raises:
            DataError: The engine's experts are none of this model's.
        """
        if self._source is not None:
            assert self._shape is not None
            self._table = RouteTable(batch.total_lengths, samples, self.layers, self._shape)
            if self._source == "engine":
                self._table.take(batch)

    @contextlib.contextmanager
    def old_pass(self) -> Iterator[None]:
        """The old-policy pass: where routes are recorded, unless the engine has brought them.

        Collective over the context-parallel group, and the tensor-parallel group if it splits tokens.
        """
        if self._source == "engine":
            with self._as("replay"):
                yield
        elif self._source == "log_prob_pass":
            with self._as("record"):
                yield
            assert self._table is not None
            # A token may be on another rank in training than it was in this pass.
            groups = [self._parallel.tp_group] if self._split > 1 else []
            groups += [self._parallel.cp_group] if self._parallel.cp_size > 1 else []
            self._table.complete(groups, self._parallel.device)
        else:
            yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """The passes with a backward, in which routes are replayed."""
        with self._as("off" if self._source is None else "replay"):
            yield

    def enter(self, micro_batch: MicroBatch) -> None:
        """Prepare for a micro-batch that goes into the model now."""
        self.row = None
        if self._mode == "record":
            self.row = _RowRoutes(None)
        elif self._mode == "replay":
            assert self._table is not None
            ids, known = self._table.lookup(micro_batch.pieces, self._places(micro_batch))
            device = self._parallel.device
            self.row = _RowRoutes(ids.to(device), None if known.all() else known.to(device))

    def leave(self, micro_batch: MicroBatch, output: Tensor) -> None:
        """Note what a micro-batch did that has come out of the model, and that its backward needs the same."""
        row, self.row = self.row, None
        if row is None:
            return
        if row.given is None:
            if row.found:
                assert self._table is not None
                slots = sorted(row.found)
                ids = torch.stack([row.found[slot] for slot in slots], dim=1)
                self._table.record(micro_batch.pieces, self._places(micro_batch), slots, ids)
        elif output.requires_grad:
            # The backward of a row runs from here to its end before anything else does on this rank, and all
            # recomputation, whatever its granularity, happens in it.
            output.register_hook(lambda grad: self._resume(row))

    def _resume(self, row: _RowRoutes) -> None:
        self.row = row

    @contextlib.contextmanager
    def _as(self, mode: Literal["off", "record", "replay"]) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode, self.row = "off", None

    def _places(self, micro_batch: MicroBatch) -> Tensor:
        """``[n]`` places in the row of the tokens that this rank's routers see."""
        parallel = self._parallel
        index = context_parallel_index(micro_batch.row.layout.num_tokens, parallel.cp_rank, parallel.cp_size)
        return index.chunk(self._split)[parallel.tp_rank] if self._split > 1 else index


def routing_replay(config: Config, chunks: Sequence[Any], parallel: ParallelState) -> RoutingReplay:
    """The replay that ``--use-routing-replay`` and ``--use-rollout-routing-replay`` ask for; a critic has none."""
    algorithm, megatron = config.algorithm, config.megatron
    wanted = algorithm.use_routing_replay or algorithm.use_rollout_routing_replay
    if not wanted or config.role == "critic":
        return RoutingReplay(chunks, parallel)
    return RoutingReplay(
        chunks,
        parallel,
        shape=RouteShape(
            num_layers=megatron.num_layers, num_experts=megatron["num_experts"], topk=megatron["moe_router_topk"]
        ),
        source="engine" if algorithm.use_rollout_routing_replay else "log_prob_pass",
        sequence_parallel=megatron.sequence_parallel,
    )
