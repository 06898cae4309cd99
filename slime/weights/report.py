"""What a weight update takes and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Bucket = Sequence[tuple[str, Tensor]]
"""Whole tensors under their Hugging Face names; empty on a rank that only contributes shards."""

Receivers = Literal["first", "all"]
"""Who gets whole tensors: the first rank alone, or every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one update did.

    Args:
        seconds: From the pause to the continuation.
        bytes: Tensor data sent, counted once however many engines read it.
        tensors: Number of tensors sent.
        verified: Comparisons of checksums made, over all engines; one that fails is an error.
        metrics: Further numbers of the transport, under their metric names.
    """

    seconds: float
    bytes: int
    tensors: int
    verified: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
