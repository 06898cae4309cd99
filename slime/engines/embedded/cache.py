"""Keys and values of running rows: slabs of contiguous rows, one slab per power-of-two length.

A row lives in the slab whose width fits its length and moves to a wider one when it outgrows it, so a decode step
reads at most twice what it needs and one batched product serves all rows of a slab. Live rows are always the first
ones of their slab: a finished row is replaced by the last one, so the cost of a step follows the live rows. All
memory is accounted against one budget of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from slime.engines.embedded.kv import CacheShape, KvBlock

if TYPE_CHECKING:
    from slime.engines.embedded.prefix import PrefixEntry

MIN_WIDTH = 64
"""Width of the narrowest slab, in tokens."""
_FIRST_ROWS = 4


class KvFullError(RuntimeError):
    """The budget of ``--max-total-tokens`` is used up."""


@dataclass
class KvBudget:
    """Tokens of key-value memory: allowed and in use."""

    capacity: int
    used: int = 0

    def reserve(self, tokens: int) -> None:
        """Account for ``tokens`` more, or raise KvFullError."""
        if self.used + tokens > self.capacity:
            raise KvFullError(f"{tokens} more tokens of KV cache do not fit: {self.used} of {self.capacity} are in use")
        self.used += tokens

    def give_back(self, tokens: int) -> None:
        """Account for ``tokens`` less."""
        self.used -= tokens


@dataclass(eq=False)
class Row:
    """Keys and values of one running sequence.

    ``length`` tokens are in row ``index`` of ``slab``. If ``shared`` is set, they follow the first ``shared_length``
    tokens of that prompt, which the rows of a group read from one place. ``generation`` is that of the oldest weights
    that any of them was computed with.
    """

    slab: Slab
    index: int
    length: int
    shared: PrefixEntry | None = None
    shared_length: int = 0
    generation: int = 0

    @property
    def kv(self) -> KvBlock:
        """The row's own tokens."""
        return self.slab.kv.row(self.index).span(0, self.length)

    @property
    def position(self) -> int:
        """Position of the next token, that is, the number of tokens before it."""
        return self.shared_length + self.length


@dataclass(eq=False)
class Slab:
    """Memory of rows of up to ``width`` tokens; the first ``len(rows)`` rows are live."""

    width: int
    kv: KvBlock
    rows: list[Row] = field(default_factory=list[Row])

    @property
    def tokens(self) -> int:
        """Allocated tokens."""
        return self.kv.num_rows * self.width


class SlabPool:
    """All slabs of one engine.

    Args:
        shape: What is kept of a token.
        dtype: Of keys and values.
        device: Where they live.
        budget: Shared with the prefix cache.
    """

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device, budget: KvBudget) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._budget = budget
        self.slabs: dict[int, Slab] = {}

    def add(self, length: int, capacity: int) -> Row:
        """Make a live row for ``length`` tokens now and about ``capacity`` later; its contents are for the caller.

        Raises:
            KvFullError: No memory for it.
        """
        slab = self._slab(max(length + 1, capacity))
        if len(slab.rows) == slab.kv.num_rows:
            self._grow(slab)
        row = Row(slab, len(slab.rows), length)
        slab.rows.append(row)
        return row

    def remove(self, row: Row) -> None:
        """Free a row: the last row of its slab takes its place."""
        slab = row.slab
        last = slab.rows.pop()
        if last is not row:
            slab.kv.row(row.index).span(0, last.length).copy_(last.kv)
            slab.rows[row.index] = last
            last.index = row.index
        row.index = -1

    def make_room(self, row: Row) -> None:
        """Move ``row`` to a wider slab if its own has no place for one more token.

        Raises:
            KvFullError: No memory for the wider row; ``row`` is as it was.
        """
        if row.length < row.slab.width:
            return
        wider = self.add(row.length, row.slab.width + 1)
        wider.kv.copy_(row.kv)
        self.remove(row)
        row.slab, row.index = wider.slab, wider.index
        row.slab.rows[row.index] = row

    def free_unused(self) -> int:
        """Free all memory beyond the live rows; return the tokens given back."""
        before = sum(slab.tokens for slab in self.slabs.values())
        self.slabs = {width: slab for width, slab in self.slabs.items() if slab.rows}
        for slab in self.slabs.values():
            if len(slab.rows) < slab.kv.num_rows:
                slab.kv = slab.kv.first_rows(len(slab.rows)).clone()
        freed = before - sum(slab.tokens for slab in self.slabs.values())
        self._budget.give_back(freed)
        return freed

    def _slab(self, tokens: int) -> Slab:
        width = MIN_WIDTH
        while width < tokens:
            width *= 2
        slab = self.slabs.get(width)
        if slab is None:
            slab = Slab(width, self._allocate(0, width))
            self.slabs[width] = slab
        return slab

    def _grow(self, slab: Slab) -> None:
        rows = slab.kv.num_rows
        more = max(rows, _FIRST_ROWS)
        while more > 1 and self._budget.used + more * slab.width > self._budget.capacity:
            more //= 2
        self._budget.reserve(more * slab.width)
        larger = self._allocate(rows + more, slab.width)
        larger.first_rows(rows).copy_(slab.kv)
        slab.kv = larger

    def _allocate(self, rows: int, width: int) -> KvBlock:
        return self._shape.allocate(width, rows=rows, dtype=self._dtype, device=self._device)
