"""Many tensors in one piece of memory, and the note that lets an engine of the same machine read them there.

Owns the layout of a piece, the copy into it, and the payload of ``/update_weights_from_tensor``: SGLang's
``flattened_bucket`` format, a pickle of one shared tensor and where each named tensor lies in it. Tests hold: every
receiver of a piece in shared memory finds it, however many there are, and nothing is left when they are done.
"""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions
from typing_extensions import override

from slime.weights.report import Bucket

LOAD_FORMAT = "flattened_bucket"

multiprocessing = cast(Any, torch.multiprocessing)
_reductions = cast(Any, reductions)
_DEVICE_ARGUMENT = 6
"""Position of the device in what torch pickles of a CUDA tensor."""
_ALIGNMENT_BYTES = 64
_SHARED_MEMORY = Path("/dev/shm")


class FlatBucket:
    """Tensors laid out one behind the other in one new piece of memory on their device, or shared on the CPU.

    Args:
        bucket: (name, tensor) pairs, all on one device; not empty. They are copied.
    """

    def __init__(self, bucket: Bucket) -> None:
        first = bucket[0][1]
        offsets: list[int] = []
        end = 0
        for _, tensor in bucket:
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.nbytes = sum(tensor.nbytes for _, tensor in bucket)
        with sharing_by_name():
            self._flat = torch.empty(max(end, 1), dtype=torch.uint8, device=first.device)
            if not first.is_cuda:
                cast(Any, self._flat).share_memory_()
        self._metadata = [
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=offset,
                end_idx=offset + tensor.nbytes,
                numel=tensor.nbytes,
            )
            for (name, tensor), offset in zip(bucket, offsets, strict=True)
        ]
        self.views: list[tuple[str, Tensor]] = []
        for (name, tensor), offset in zip(bucket, offsets, strict=True):
            view = self._flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor.detach())
            self.views.append((name, view))

    def payloads(self, count: int) -> list[str]:
        """One note for each of ``count`` receivers; each may be read once, and must be.

        Pieces in shared memory count their receivers: two that read the same note would free it under a third.
        """
        if self._flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # the copies are done before anybody is told
        with sharing_by_name():
            return [_serialized({"flattened_tensor": self._flat, "metadata": self._metadata}) for _ in range(count)]

    def free(self, *, unread: bool = False) -> None:
        """Give the memory back; on a GPU it is reused when every receiver has let go of it.

        Args:
            unread: A receiver may not have read its note and never will: take the name of shared memory away, which
                would otherwise wait for it until this process ends.
        """
        is_cuda = self._flat.is_cuda
        name = _abandon(self._flat) if unread and not is_cuda else None
        self.views.clear()
        del self._flat
        if name is not None:
            name.unlink()
        if is_cuda:
            torch.cuda.ipc_collect()


def _abandon(flat: Tensor) -> Path:
    """Make the count of users never reach zero: the last one would abort on a name that is gone. Returns the file."""
    storage = cast(Any, flat.untyped_storage())
    with sharing_by_name():
        handle: bytes = storage._share_filename_cpu_()[1]
    storage._shared_incref()
    return _SHARED_MEMORY / handle.decode().lstrip("/")


@contextlib.contextmanager
def sharing_by_name() -> Generator[None]:
    """Share CPU memory by file name: the default, file descriptors, only reaches relatives of a process."""
    strategy = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(strategy)


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID: the receiver may count the GPUs that it sees in another way."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or not obj.is_cuda:
            return NotImplemented
        rebuild, arguments = cast("tuple[Callable[..., Any], tuple[Any, ...]]", _reductions.reduce_tensor(obj))
        uuid = str(cast(Any, torch.cuda).get_device_properties(obj.device).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


def _serialized(value: Any) -> str:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def pieces_of(bucket: Bucket, max_bytes: int) -> Iterator[Sequence[tuple[str, Tensor]]]:
    """Cut a bucket so that no piece exceeds the bound, unless one tensor alone does."""
    piece: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in bucket:
        if piece and size + tensor.nbytes > max_bytes:
            yield piece
            piece, size = [], 0
        piece.append((name, tensor))
        size += tensor.nbytes
    if piece:
        yield piece
