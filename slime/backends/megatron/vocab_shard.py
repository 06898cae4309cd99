"""Which columns of the vocabulary one tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The vocabulary columns this rank holds.

    Args:
        start: Token id of column 0.
        num_valid: Columns that are real tokens; the rest is padding and takes part in nothing.
        group: Ranks that hold the other columns; None when there are none.
    """

    start: int
    num_valid: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, vocab_size: int, num_columns: int, rank: int = 0, group: dist.ProcessGroup | None = None) -> VocabShard:
        """Shard ``rank`` of a vocabulary padded to equal shards of ``num_columns``."""
        start = rank * num_columns
        return cls(start=start, num_valid=min(max(vocab_size - start, 0), num_columns), group=group)

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each token id in this shard (0 where it is elsewhere), and whether it is here."""
        column = ids - self.start
        held = (column >= 0) & (column < self.num_valid)
        return torch.where(held, column, torch.zeros_like(column)), held
