"""Key-value memory of one engine: rows of running sequences and kept prompts over one budget.

Every move of a sequence's tokens between the two is here: a computed prompt becomes a row or is shared by rows, a
finished row becomes a kept prompt. Tests hold: what is not in use is given back, and nothing that was computed with
earlier weights is found after an update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slime.engines.embedded.cache import KvBudget, KvFullError, Row, SlabPool
from slime.engines.embedded.kv import CacheShape
from slime.engines.embedded.prefix import PrefixCache, PrefixEntry, TokenArray

_LEAST_EVICTED = 1024


class KvMemory:
    """The memory and what is in it.

    Args:
        shape: What is kept of a token.
        dtype: Of keys and values.
        device: Where they live.
        max_total_tokens: Budget.
        enable_prefix_cache: Whether prompts are kept for later requests.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_total_tokens: int,
        enable_prefix_cache: bool,
    ) -> None:
        self.budget = KvBudget(max_total_tokens)
        self.pool = SlabPool(shape, dtype=dtype, device=device, budget=self.budget)
        self.prompts = PrefixCache(shape, dtype=dtype, device=device, budget=self.budget, enabled=enable_prefix_cache)

    def with_room(self, action: Callable[[], None], tokens: int) -> bool:
        """Run ``action``; if memory is short, evict kept prompts and try again; False if it does not fit."""
        for is_last in (False, True):
            try:
                action()
                return True
            except KvFullError:
                freed = self.pool.free_unused() + self.prompts.evict(max(4 * tokens, _LEAST_EVICTED))
                if is_last or not freed:
                    return False
        return False

    def start(self, sequence: TokenArray, matched: int, found: PrefixEntry | None) -> PrefixEntry:
        """An entry for ``sequence``, in use, whose first ``matched`` tokens are those of ``found``.

        Raises:
            KvFullError: No memory for it.
        """
        if found is not None:
            found.users += 1  # must survive the eviction that makes room for the new entry
        try:
            entry = self.prompts.create(sequence)
            if found is not None:
                entry.kv.span(0, matched).copy_(found.kv.span(0, matched))
        finally:
            if found is not None:
                self.prompts.release(found)
        entry.filled = matched
        return entry

    def place(self, entry: PrefixEntry, room: int, *, share: bool) -> Row | None:
        """Turn one use of a computed prompt into a live row with ``room`` for new tokens; None if it does not fit.

        Args:
            entry: The prompt; the use goes over to the row if it is shared, and ends otherwise.
            room: New tokens to have memory for at once.
            share: Whether the row reads the prompt where it is instead of from a copy.
        """
        length = len(entry.tokens)
        placed: list[Row] = []

        def place() -> None:
            row = self.pool.add(0, room) if share else self.pool.add(length, length + room)
            row.generation = entry.generation
            if share:
                row.shared, row.shared_length = entry, length
            else:
                row.kv.copy_(entry.kv)
            placed.append(row)

        if self.with_room(place, length) and share:
            return placed[0]
        self.prompts.release(entry)
        return placed[0] if placed else None

    def make_room(self, row: Row) -> bool:
        """See that a row has a place for its next token; False if memory is short."""
        return row.length < row.slab.width or self.with_room(lambda: self.pool.make_room(row), row.length)

    def keep(self, row: Row, sequence: TokenArray) -> None:
        """Make the tokens of a row findable for a later turn of the same conversation, if there is memory."""
        if self.prompts.is_enabled and row.generation == self.prompts.generation:
            self.with_room(lambda: self._keep(row, sequence[: row.position]), row.position)

    def drop(self, row: Row) -> None:
        """Free a row."""
        self.pool.remove(row)
        if row.shared is not None:
            self.prompts.release(row.shared)

    def _keep(self, row: Row, sequence: TokenArray) -> None:
        entry = self.prompts.create(sequence)
        cut = row.shared_length
        if row.shared is not None:
            entry.kv.span(0, cut).copy_(row.shared.kv.span(0, cut))
        entry.kv.span(cut, row.position).copy_(row.kv)
        entry.filled = row.position
        self.prompts.insert(entry)
        self.prompts.release(entry)
