"""Read tensors that another process of this machine shares with us, and nothing else.

The payload is the one SGLang takes: a base64 pickle of ``[(name, tensor), ...]`` whose tensors are handles to shared
memory, or of one such tensor and where named ones lie in it. Unpickling runs only functions of the table below, so a
payload cannot run code of its own choosing.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import pickle
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.multiprocessing
from torch import Tensor

from slime.engines.api import RequestError

_ALLOWED = {
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.nn.parameter", "Parameter"),
    ("torch._utils", "_rebuild_parameter"),
    ("collections", "OrderedDict"),
    ("types", "SimpleNamespace"),
}
_DEVICE_ARGUMENT = 6
"""Position of the device among the arguments of ``rebuild_cuda_tensor``."""


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        if (module_name, global_name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return _rebuild_cuda_tensor
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if global_name in ("rebuild_storage_fd", "_rebuild_tensor_v2"):
            raise RequestError(
                f"the payload shares tensors by {global_name}; share them by file name: "
                "torch.multiprocessing.set_sharing_strategy('file_system') and a ForkingPickler"
            )
        raise RequestError(f"the payload names {module_name}.{global_name}; only shared tensors are accepted")


def _rebuild_cuda_tensor(*arguments: Any) -> Tensor:
    """Open a handle whose GPU is named by its UUID: the sender may count the GPUs that it sees in another way."""
    device = arguments[_DEVICE_ARGUMENT]
    if isinstance(device, str):
        found = [i for i in range(torch.cuda.device_count()) if _uuid(i) == device]
        if not found:
            raise RequestError(f"the tensors are on GPU {device}, which this engine does not see")
        arguments = (*arguments[:_DEVICE_ARGUMENT], found[0], *arguments[_DEVICE_ARGUMENT + 1 :])
    return cast(Any, torch.multiprocessing).reductions.rebuild_cuda_tensor(*arguments)


def _uuid(device: int) -> str:
    return str(cast(Any, torch.cuda).get_device_properties(device).uuid)


def flat_tensors(
    flat: Tensor, layout: Sequence[tuple[str, Sequence[int], torch.dtype, int]]
) -> list[tuple[str, Tensor]]:
    """Views of named tensors in one tensor of bytes.

    Args:
        flat: ``[bytes]`` uint8.
        layout: (name, shape, dtype, first byte) of each.

    Raises:
        RequestError: One does not lie within.
    """
    views: list[tuple[str, Tensor]] = []
    for name, shape, dtype, start in layout:
        end = start + math.prod(shape) * dtype.itemsize
        if not 0 <= start <= end <= flat.numel() or start % dtype.itemsize:
            raise RequestError(f"{name} lies at bytes {start} to {end} of a bucket of {flat.numel()}")
        views.append((name, flat[start:end].view(dtype).view(torch.Size(shape))))
    return views


def read_shared_tensors(payloads: list[str], load_format: str | None = None) -> list[tuple[str, Tensor]]:
    """Tensors of an ``/update_weights_from_tensor`` payload, still in the sender's memory.

    Args:
        payloads: One base64 string per tensor-parallel rank; the embedded engine has one rank.
        load_format: ``flattened_bucket``, or a list of tensors.

    Raises:
        RequestError: The payload is no list of named shared tensors.
    """
    if len(payloads) != 1:
        raise RequestError(f"serialized_named_tensors has {len(payloads)} entries; this engine has one rank: send one")
    try:
        value = _TensorUnpickler(io.BytesIO(base64.b64decode(payloads[0], validate=True))).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, IndexError, TypeError, KeyError) as error:
        raise RequestError(f"serialized_named_tensors[0] cannot be read: {error!r}") from error
    except RuntimeError as error:  # the shared memory is gone
        raise RequestError(f"serialized_named_tensors[0] points to memory that cannot be opened: {error}") from error
    if load_format == "flattened_bucket":
        return _of_bucket(value)
    if not isinstance(value, list):
        raise RequestError(f"the payload holds a {type(value).__name__}; accepted: a list of (name, tensor)")
    pairs = cast("list[Any]", value)
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise RequestError("the payload holds something else than (name, tensor) pairs")
    return pairs


def _of_bucket(value: Any) -> list[tuple[str, Tensor]]:
    try:
        flat = value["flattened_tensor"]
        layout = [(str(m.name), tuple(m.shape), m.dtype, int(m.start_idx)) for m in value["metadata"]]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise RequestError(
            f"the payload is no flattened bucket ({error!r}); accepted: a dict of flattened_tensor and metadata"
        ) from error
    dtypes_fit = all(isinstance(dtype, torch.dtype) for _, _, dtype, _ in layout)
    if not isinstance(flat, Tensor) or flat.dtype != torch.uint8 or not dtypes_fit:
        raise RequestError(
            "the flattened tensor of the payload is not one of bytes, or a dtype of its metadata is none"
        )
    return flat_tensors(flat, layout)
