"""What of a training rank lies on its device: everything, the parameters alone, or nothing.

A colocated trainer leaves the device while the engines generate. Parameters and optimizer state are copied
to page-locked host memory, gradients are dropped; then the storages themselves are emptied, and filled again
later, so that every view of them stays valid: Megatron's buckets, the optimizer's shards, tied weights.
Process groups stay. Owns no order of turns. Tests hold: training with a turn between all steps gives
the same bits as training without; afterwards no tensor of training is left on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from slime.backends.megatron.snapshots import model_tensors

BLOCK_BYTES = 1 << 28
"""Host memory is taken in blocks of this size: page-locked memory comes in powers of two."""


class Part(Enum):
    """Memory that comes and goes together."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"


class DeviceState:
    """The state of one rank's training, and which parts of it are on the device.

    Args:
        chunks: The wrapped model chunks.
        optimizer: Megatron's optimizer of them.
        device: Where training runs.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, device: torch.device) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        self._away: dict[Part, list[_Parked]] = {}
        self._host = {part: HostSpace(pinned=device.type == "cuda") for part in (Part.PARAMETERS, Part.OPTIMIZER)}

    def keep(self, *wanted: Part) -> None:
        """Bring these parts to the device and take all others from it. Not collective."""
        leaving = [part for part in Part if part not in wanted and part not in self._away]
        coming = [part for part in Part if part in wanted and part in self._away]
        for part in leaving:
            self._away[part] = self._copy_out(part)
        self._finish_copies()
        for part in leaving:
            for parked in self._away[part]:
                parked.storage.resize_(0)
        if leaving:
            self._return_cached_memory()
        for part in coming:
            self._bring_in(part)
        self._finish_copies()

    @property
    def on_device(self) -> tuple[Part, ...]:
        """What is on the device now."""
        return tuple(part for part in Part if part not in self._away)

    def _copy_out(self, part: Part) -> list[_Parked]:
        if part is Part.GRADIENTS:
            self._optimizer.zero_grad()  # main gradients in another dtype are tensors of their own
        storages = self._storages(part)
        parked = [_Parked(storage, storage.nbytes()) for storage in storages]
        if part in self._host:
            space = self._host[part]
            space.reserve(sum(entry.num_bytes for entry in parked))
            for entry, copy in _placed(parked, space):
                _copy(entry.storage, copy, out=True)
        return parked

    def _bring_in(self, part: Part) -> None:
        parked = self._away[part]
        for entry in parked:
            entry.storage.resize_(entry.num_bytes)
        if part in self._host:
            for entry, copy in _placed(parked, self._host[part]):
                _copy(entry.storage, copy, out=False)
        else:
            for entry in parked:
                _bytes(entry.storage).zero_()
        del self._away[part]

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        """Distinct storages of a part on the device; a parameter that the optimizer shares is the model's."""
        of_model = self._on_device(model_tensors(self._chunks))
        if part is Part.PARAMETERS:
            found = of_model
        elif part is Part.GRADIENTS:
            found = self._on_device(_gradient_buffers(self._chunks))
        else:
            found = self._on_device(_optimizer_tensors(self._optimizer))
            found = {address: storage for address, storage in found.items() if address not in of_model}
        return list(found.values())

    def _on_device(self, tensors: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.device == self._device]
        return {s.data_ptr(): s for s in storages if s.nbytes() and s.resizable()}

    def _finish_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _return_cached_memory(self) -> None:
        for rotary in (RotaryEmbedding, YarnRotaryEmbedding):  # small tables, but each may hold on to a large block
            rotary.forward.cache_clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class _Parked:
    """A storage that is empty for now."""

    def __init__(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        self.storage = storage
        self.num_bytes = num_bytes


class HostSpace:
    """Host memory for one part, kept between turns; storages lie in it one after the other."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def reserve(self, num_bytes: int) -> None:
        """Grow to at least this size; what is in it stays where it is."""
        while (missing := num_bytes - self.num_bytes) > 0:
            size = min(missing, BLOCK_BYTES)
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))

    def pieces(self, start: int, num_bytes: int) -> Iterator[Tensor]:
        """Consecutive uint8 tensors that together are bytes ``[start, start + num_bytes)``."""
        for block in self._blocks:
            if num_bytes <= 0:
                return
            if start < block.numel():
                piece = block[start : start + num_bytes]
                num_bytes -= piece.numel()
                start = 0
                yield piece
            else:
                start -= block.numel()


def device_memory(device: torch.device) -> dict[str, float]:
    """``device_bytes`` in use by all processes, ``trainer_bytes`` taken by this one's tensors; empty on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"device_bytes": float(total - free), "trainer_bytes": float(torch.cuda.memory_reserved(device))}


def _placed(parked: Sequence[_Parked], space: HostSpace) -> Iterator[tuple[_Parked, list[Tensor]]]:
    """Each storage with its place in host memory."""
    start = 0
    for entry in parked:
        yield entry, list(space.pieces(start, entry.num_bytes))
        start += entry.num_bytes


def _copy(storage: torch.UntypedStorage, pieces: Sequence[Tensor], *, out: bool) -> None:
    """Copy between a storage and its place; on a device the copies end with its stream's work so far."""
    on_device = _bytes(storage).split([piece.numel() for piece in pieces])
    for theirs, mine in zip(on_device, pieces, strict=True):
        source, target = (theirs, mine) if out else (mine, theirs)
        target.copy_(source, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """``[n]`` uint8: a storage as its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _gradient_buffers(chunks: Sequence[Any]) -> list[Tensor]:
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """Main parameters and moments; a stage without experts has a part without an optimizer."""
    inner = [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]
    parameters = [p for one in inner for group in one.param_groups for p in group["params"]]
    states = [value for one in inner for state in one.state.values() for value in state.values()]
    return parameters + [value for value in states if isinstance(value, Tensor)]
