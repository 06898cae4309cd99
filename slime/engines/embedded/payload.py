"""Read tensors that another process of this machine shares with us, and nothing else.

The payload is the one SGLang takes: a base64 pickle of ``[(name, tensor), ...]`` whose tensors are handles to shared
memory. Unpickling runs only functions of the table below, so a payload cannot run code of its own choosing.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from typing import Any, cast

import torch
from torch import Tensor

from slime.engines.api import RequestError

_ALLOWED = {
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.nn.parameter", "Parameter"),
    ("torch._utils", "_rebuild_parameter"),
    ("collections", "OrderedDict"),
}


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if global_name in ("rebuild_storage_fd", "_rebuild_tensor_v2"):
            raise RequestError(
                f"the payload shares tensors by {global_name}; share them by file name: "
                "torch.multiprocessing.set_sharing_strategy('file_system') and a ForkingPickler"
            )
        raise RequestError(f"the payload names {module_name}.{global_name}; only shared tensors are accepted")


def read_shared_tensors(payloads: list[str]) -> list[tuple[str, Tensor]]:
    """Tensors of an ``/update_weights_from_tensor`` payload, still in the sender's memory.

    Args:
        payloads: One base64 string per tensor-parallel rank; the embedded engine has one rank.

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
    if not isinstance(value, list):
        raise RequestError(f"the payload holds a {type(value).__name__}; accepted: a list of (name, tensor)")
    pairs = cast("list[Any]", value)
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise RequestError("the payload holds something else than (name, tensor) pairs")
    return pairs
