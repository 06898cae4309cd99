"""Checksum of a tensor: the same on the trainer's side and in the engine, so that a lost update cannot go unseen."""

from __future__ import annotations

from typing import Any, cast

import torch
import xxhash
from torch import Tensor


def tensor_checksum(tensor: Tensor) -> str:
    """Sum up values, dtype and shape of a CPU tensor.

    Args:
        tensor: Any shape and dtype; a view is summed as its contiguous copy.

    Returns:
        32 hex digits: xxh3-128 over dtype and shape followed by the bytes in row-major order.

    Raises:
        ValueError: The tensor is not on the CPU.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"the checksum needs a CPU tensor, found one on {tensor.device}; move it with .cpu()")
    digest = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel():
        digest.update(cast(Any, flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
