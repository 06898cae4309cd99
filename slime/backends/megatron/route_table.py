"""Expert ids of a rank's samples by position and layer, independent of rows and ranks.

Owns the compact store in host memory, its filling from an engine's columns or from recorded rows, and
the look-up for a row. Torch only; knows nothing of Megatron. Tests hold: what was recorded from rows of
one packing is found for rows of any other; columns that do not fit the model are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from slime.backends.megatron.layout import Piece
from slime.errors import DataError
from slime.replay_data import UNROUTED
from slime.types import RolloutBatch

FLAG = "--use-rollout-routing-replay"
EXCHANGE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """What the routes of a model look like.

    Args:
        num_layers: Layers of the whole model, dense ones included.
        num_experts: Routed experts of a layer.
        topk: Experts of one token.
    """

    num_layers: int
    num_experts: int
    topk: int


class RouteTable:
    """Routes of some samples in some layers.

    Args:
        lengths: Tokens of every sample of the batch.
        samples: This rank's samples.
        layers: Numbers, from 0, of the layers kept here.
        shape: The model's routes.
    """

    def __init__(
        self, lengths: Sequence[int], samples: Sequence[int], layers: Sequence[int], shape: RouteShape
    ) -> None:
        starts = np.cumsum([0, *(lengths[i] for i in samples)])
        self._starts = dict(zip(samples, starts[:-1].tolist(), strict=True))
        self._layers, self._shape = tuple(layers), shape
        dtype = torch.uint8 if shape.num_experts <= 256 else torch.int16
        self._ids = torch.zeros(int(starts[-1]), len(layers), shape.topk, dtype=dtype)
        self._known = torch.zeros(int(starts[-1]), dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Memory of the ids."""
        return self._ids.nbytes + self._known.nbytes

    def take(self, batch: RolloutBatch) -> None:
        """Fill in what the engine found.

        Raises:
            DataError: Ids that are no experts of this model, or one twice for the same token.
        """
        assert batch.rollout_routed_experts is not None
        for i, start in self._starts.items():
            ids = torch.from_numpy(np.ascontiguousarray(batch.rollout_routed_experts[i][:, list(self._layers)]))
            known = (ids != UNROUTED).any(-1).any(-1)
            _check_ids(ids, known, self._layers, self._shape, f"sample {batch.sample_indices[i]}")
            self._ids[start : start + len(ids)] = torch.where(known[:, None, None], ids, 0).to(self._ids.dtype)
            self._known[start : start + len(ids)] = known.to(self._known.dtype)

    def record(self, pieces: Sequence[Piece], places: Tensor, slots: Sequence[int], ids: Tensor) -> None:
        """Keep the ids of a row's tokens for every sample that they belong to.

        Args:
            pieces: Whose tokens are where in the row.
            places: ``[n]`` places in the row that ``ids`` are of.
            slots: Which of the table's layers.
            ids: ``[n, len(slots), k]`` expert ids.
        """
        ids = ids.to(self._ids.dtype).cpu()
        end = max((piece.start + piece.length for piece in pieces), default=0)
        place = torch.full((max(end, int(places.max()) + 1 if len(places) else 0),), -1)
        place[places] = torch.arange(len(places))
        slot_index = torch.tensor(list(slots))
        for piece in pieces:
            source = place[piece.start : piece.start + piece.length]
            here = source >= 0
            offsets = torch.arange(piece.length)[here] + piece.position
            for sample in piece.samples:
                target = offsets + self._starts[sample]
                self._ids[target[:, None], slot_index[None]] = ids[source[here]]
                self._known[target] = 1

    def complete(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Put together what the ranks of each group recorded; each token was recorded by at least one, alike.

        Collective over the groups, one after the other.
        """
        for group in groups:
            for store in (self._ids, self._known):
                # As bytes, which every backend reduces; unrecorded ones are 0.
                for part in store.view(-1).view(torch.uint8).split(EXCHANGE_BYTES):
                    sent = part.to(device)
                    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
                    part.copy_(sent)

    def lookup(self, pieces: Sequence[Piece], places: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, layers, k]`` ids of the tokens at some places of a row, and ``[n]`` bool whether they are known."""
        end = max((piece.start + piece.length for piece in pieces), default=0)
        source = torch.full((max(end, int(places.max()) + 1 if len(places) else 0),), -1)
        for piece in pieces:
            # Samples share a piece only if their routes in it are equal.
            first = self._starts[piece.samples[0]] + piece.position
            source[piece.start : piece.start + piece.length] = torch.arange(first, first + piece.length)
        source = source[places]
        known = source >= 0
        source = source.clamp_(min=0)
        if not len(self._known):
            return self._ids.new_zeros(len(source), *self._ids.shape[1:]), known
        return self._ids[source], known & self._known[source].bool()


def check_routes(batch: RolloutBatch, shape: RouteShape) -> None:
    """Check that every sample with trained tokens has routes of the model's shape.

    Raises:
        DataError: Names the sample.
    """
    for i, tokens in enumerate(batch.tokens):
        name = f"sample {batch.sample_indices[i]}"
        rows = None if batch.rollout_routed_experts is None else batch.rollout_routed_experts[i]
        if batch.loss_masks[i].any() and (rows is None or (rows == UNROUTED).all()):
            raise DataError(
                f"{name} carries no rollout_routed_experts, which {FLAG} replays; the generate function must record "
                "what the engine returns for return_routed_experts"
            )
        expected = (len(tokens) - 1, shape.num_layers, shape.topk)
        if rows is not None and rows.shape != expected:
            raise DataError(
                f"{name}: rollout_routed_experts has the shape {list(rows.shape)}; {FLAG} needs {list(expected)}: "
                "tokens - 1, layers, experts per token of the model that is trained"
            )


def _check_ids(ids: Tensor, known: Tensor, layers: Sequence[int], shape: RouteShape, name: str) -> None:
    """Raise DataError unless ``[n, layers, k]`` ids name different experts for each known token."""
    outside = ((ids < 0) | (ids >= shape.num_experts)).any(-1)
    repeated = torch.zeros_like(outside)
    for a, b in combinations(range(shape.topk), 2):
        repeated |= ids[..., a] == ids[..., b]
    wrong = (outside | repeated) & known[:, None]
    if wrong.any():
        token, slot = wrong.nonzero()[0].tolist()
        raise DataError(
            f"{name}: rollout_routed_experts sends token {token} in layer {layers[slot]} to the experts "
            f"{ids[token, slot].tolist()}; {FLAG} needs {shape.topk} different ones from 0 to {shape.num_experts - 1}"
        )
