"""What an engine's checksums should be, computed from the tensors while they are sent.

Owns the assembly of an engine's tensors from Hugging Face ones: parts are summed up as they come and only what comes
before its turn is kept, at most the parts of one fused tensor. Which tensors are fused is ``engine_names``'s, how a
checksum is made ``digests``'s and ``checksum``'s. Tests hold: any order of the parts gives the checksums of the whole
tensors, and nothing is kept of parts that came in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from slime.weights.checksum import tensor_checksum
from slime.weights.digests import Digest
from slime.weights.engine_names import EnginePlace, EngineTable
from slime.weights.precision import held_dtype

Wanted = Callable[[str], bool]
"""Whether the engine's tensor of this name is to be checked."""


@dataclass(slots=True, kw_only=True)
class Checksums:
    """What engines of one layout should answer.

    Args:
        ranks: For each process of the engine: its name of a tensor, and the checksum.
        sizes: Bytes of each of the engine's tensors over all its processes.
        unknown: What cannot be said anything about, and why; Hugging Face names, or the engine's.
    """

    ranks: list[dict[str, str]]
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    unknown: dict[str, str] = field(default_factory=dict[str, str])


class Expectation(Protocol):
    """Checksums in the making, for engines of one layout."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor that is sent, under its Hugging Face name."""
        ...

    def finish(self) -> Checksums:
        """What the engine should answer; nothing may be added afterwards."""
        ...


class PlainExpectation(Expectation):
    """For an engine that keeps Hugging Face names and sums up dtype and shape too: the embedded one.

    Args:
        dtype: Of the engine's model; None leaves tensors as they are.
        wanted: Chooses the tensors.
    """

    def __init__(self, dtype: torch.dtype | None, wanted: Wanted) -> None:
        self._dtype = dtype
        self._wanted = wanted
        self._found = Checksums(ranks=[{}])

    @override
    def add(self, name: str, tensor: Tensor) -> None:
        held = _as_held(name, tensor, self._dtype)
        self._found.sizes[name] = held.nbytes
        if self._wanted(name):
            self._found.ranks[0][name] = tensor_checksum(held.cpu())

    @override
    def finish(self) -> Checksums:
        return self._found


@dataclass(slots=True)
class _Assembly:
    """One process's tensor in the making."""

    digest: Digest
    missing: int
    early: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    next: int = 0

    def add(self, position: int, pieces: list[Tensor]) -> None:
        if position != self.next:
            self.early[position] = [piece.clone() for piece in pieces]  # the sender frees its memory
            return
        for ready in self._from_here(pieces):
            for piece in ready:
                self.digest.update(piece)
            self.next += 1
            self.missing -= 1

    def _from_here(self, pieces: list[Tensor]) -> Iterator[list[Tensor]]:
        yield pieces
        while self.next in self.early:
            yield self.early.pop(self.next)


class FusedExpectation(Expectation):
    """For an engine whose tensors are put together from several: SGLang.

    Args:
        table: Where each tensor belongs.
        digest: Makes the engine's kind of checksum.
        dtype: Of the engine's model; None leaves tensors as they are.
        wanted: Chooses the engine's tensors.
    """

    def __init__(
        self, table: EngineTable, digest: Callable[[], Digest], dtype: torch.dtype | None, wanted: Wanted
    ) -> None:
        self._table = table
        self._digest = digest
        self._dtype = dtype
        self._wanted = wanted
        self._open: dict[tuple[str, int], _Assembly] = {}
        self._found = Checksums(ranks=[{} for _ in range(table.layout.tp_size)])

    @override
    def add(self, name: str, tensor: Tensor) -> None:
        place = self._table.place(name)
        if place is None:
            self._found.unknown[name] = "the table of engine tensors does not have it"
            return
        held = tensor.float() if place.row.is_float32 else _as_held(name, tensor, self._dtype)
        for rank in range(1 if place.row.is_replicated else self._table.layout.tp_size):
            self._add_share(place, held, rank)

    def _add_share(self, place: EnginePlace, tensor: Tensor, rank: int) -> None:
        position = self._table.position(place, rank)
        if position is None:
            return
        pieces = self._table.pieces(place, tensor, rank)
        if pieces is None:
            size = self._table.layout.tp_size
            self._found.unknown[place.name] = f"{list(tensor.shape)} cannot be divided evenly by {size} processes"
            return
        copies = self._table.layout.tp_size if place.row.is_replicated else 1
        self._found.sizes.setdefault(place.name, 0)
        self._found.sizes[place.name] += copies * sum(piece.nbytes for piece in pieces)
        if not self._wanted(place.name):
            return
        key = (place.name, rank)
        if key not in self._open:
            self._open[key] = _Assembly(self._digest(), self._table.num_parts(place.row, rank))
        assembly = self._open[key]
        assembly.add(position, pieces)
        if not assembly.missing:
            del self._open[key]
            checksum = assembly.digest.hexdigest()
            for holder in range(copies) if place.row.is_replicated else (rank,):
                self._found.ranks[holder][place.name] = checksum

    @override
    def finish(self) -> Checksums:
        for name, _ in self._open:
            self._found.unknown[name] = "not all of its parts were sent"
        self._open.clear()
        return self._found


def _as_held(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(held_dtype(name, dtype))
