"""Other weights of the same model: the reference, the rollout-time policy. Kept on the CPU, lent to the model.

Owns copies of this rank's parameters and putting them into the model for a forward-only pass. Tests
hold: after the pass the model's weights are bit for bit what they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class WeightSnapshot:
    """A copy of this rank's parameters and persistent buffers, in the model's dtype."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._tensors = _host_copies(model_tensors(chunks))

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What it holds, on the CPU."""
        return self._tensors

    def update(self, chunks: Sequence[Any]) -> None:
        """Copy the model's present weights."""
        _copy_to_host(model_tensors(chunks), self._tensors)

    def copy_from(self, other: WeightSnapshot) -> None:
        """Copy another snapshot of the same model."""
        for mine, theirs in zip(self._tensors, other._tensors, strict=True):
            mine.copy_(theirs)

    def clone(self) -> WeightSnapshot:
        """An independent copy."""
        copy = WeightSnapshot(())
        copy._tensors = [t.clone() for t in self._tensors]
        return copy

    def equals(self, chunks: Sequence[Any]) -> bool:
        """Whether the model's present weights are these, bit for bit. Not collective."""
        pairs = zip(self._tensors, model_tensors(chunks), strict=True)
        return all(torch.equal(mine, theirs.detach().cpu()) for mine, theirs in pairs)

    def restore(self, chunks: Sequence[Any]) -> None:
        """Copy these weights into the model for good; the optimizer has to be told."""
        for mine, theirs in zip(self._tensors, model_tensors(chunks), strict=True):
            theirs.data.copy_(mine, non_blocking=True)  # in the order of the device's work

    @contextmanager
    def lent_to(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Let the model compute with these weights; its own come back afterwards.

        Only forward passes may run meanwhile. On a CPU the tensors change places without a copy; on
        a device the model's own weights wait on the CPU.
        """
        tensors = model_tensors(chunks)
        if all(t.device.type == "cpu" for t in tensors):
            own = [t.data for t in tensors]
            try:
                for tensor, mine in zip(tensors, self._tensors, strict=True):
                    tensor.data = mine
                yield
            finally:
                for tensor, data in zip(tensors, own, strict=True):
                    tensor.data = data
            return
        own = _host_copies(tensors)
        try:
            self.restore(chunks)
            yield
        finally:
            for tensor, data in zip(tensors, own, strict=True):
                tensor.data.copy_(data, non_blocking=True)


def _host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU; of tensors on a device in page-locked memory, which copies many times faster."""
    copies = [
        torch.empty(t.shape, dtype=t.dtype, pin_memory=True) if t.is_cuda else torch.empty_like(t, device="cpu")
        for t in tensors
    ]
    _copy_to_host(tensors, copies)
    return copies


def _copy_to_host(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for mine, theirs in zip(copies, tensors, strict=True):
        mine.copy_(theirs.detach(), non_blocking=True)
    if any(t.is_cuda for t in tensors):
        torch.cuda.synchronize()


def model_tensors(chunks: Sequence[Any]) -> list[Tensor]:
    """Every parameter and persistent buffer, e.g. the expert bias of a router; shared ones once."""
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for chunk in chunks:
            for tensor in chunk.state_dict(keep_vars=True).values():
                if isinstance(tensor, Tensor):
                    found.setdefault(id(tensor), tensor)
    return list(found.values())
