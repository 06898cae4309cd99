"""Where the bytes of each tensor are in a directory of safetensors files, and the bytes of a tensor in memory.

Reads headers only, so that a file can be patched in place and bytes can be compared without a dtype.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slime.errors import CheckpointError
from slime.weights.hf_files import weight_files

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 2**30
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What two tensors must share for their bytes to be comparable.

    Args:
        dtype: As safetensors spells it, such as ``BF16``.
        shape: Sizes.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Bytes ``[offset, offset + num_bytes)`` of ``file``."""

    file: Path
    offset: int
    num_bytes: int
    layout: Layout

    def map(self, mode: str = "r") -> NDArray[np.uint8]:
        """``[num_bytes]`` bytes, mapped from the file; ``r+`` writes through."""
        if not self.num_bytes:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(self.file, dtype=np.uint8, mode=cast(Any, mode), offset=self.offset, shape=(self.num_bytes,))


def layout_of(tensor: Tensor) -> Layout:
    """Layout of a tensor in memory."""
    return Layout(_DTYPES[tensor.dtype], tuple(tensor.shape))


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """``[N]`` bytes of a tensor in row-major order: a view of a contiguous CPU tensor, else of a copy."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return cast("NDArray[np.uint8]", cast(Any, flat.view(torch.uint8)).numpy())


def tensor_places(directory: Path) -> dict[str, TensorPlace]:
    """Where every tensor of a model directory is.

    Raises:
        CheckpointError: There are no safetensors files, or one cannot be read.
    """
    found: dict[str, TensorPlace] = {}
    for file in sorted(set(weight_files(directory).values())):
        try:
            found |= read_header(file)[0]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file}: is no complete safetensors file: {error}") from error
    return found


def read_header(file: Path) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Tensors of one safetensors file, and its metadata.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
        KeyError: Likewise.
    """
    with file.open("rb") as reader:
        length = int.from_bytes(reader.read(_LENGTH_BYTES), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"header of {length} bytes")
        header = cast("dict[str, dict[str, Any]]", json.loads(reader.read(length)))
    metadata = cast("dict[str, str]", header.pop("__metadata__", {}))
    places: dict[str, TensorPlace] = {}
    size, first = file.stat().st_size, _LENGTH_BYTES + length
    for name, entry in header.items():
        start, end = (first + int(offset) for offset in entry["data_offsets"])
        if not first <= start <= end <= size:
            raise ValueError(f"tensor {name} ends at byte {end}, the file has {size}")
        places[name] = TensorPlace(file, start, end - start, Layout(entry["dtype"], tuple(entry["shape"])))
    return places, metadata
