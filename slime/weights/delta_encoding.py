"""What changed between two versions of a tensor, as bytes; and the checksum that proves that a patch worked.

Owns the two encodings, their compression and the checksum formats; files are ``delta_files``'s. Everything works on
raw bytes, so that a dtype never matters. Tests hold: a patch of the old bytes gives the new bytes for any bytes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import xxhash
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from slime.errors import WeightSyncError

Bytes = NDArray[np.uint8]
Encoding = Literal["xor", "overwrite"]
ChecksumFormat = Literal["xxh3-128", "blake3", "adler32"]

COMPRESSION = "zstd"
MAX_OVERWRITE_BYTES = 2**32 - 1
"""Positions and their count are 32 bit numbers."""

_ZSTD_LEVEL = 1
_COUNT = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Change:
    """How one tensor changed.

    Args:
        payload: Compressed encoding, uint8.
        changed_bytes: Number of bytes that differ.
    """

    payload: Bytes
    changed_bytes: int


def check_size(num_bytes: int, encoding: Encoding, name: str) -> None:
    """Raise WeightSyncError if a tensor is too large for the encoding, before the first change is written."""
    if encoding == "overwrite" and num_bytes > MAX_OVERWRITE_BYTES:
        raise WeightSyncError(
            f"tensor {name} has {num_bytes} bytes; the overwrite encoding addresses at most {MAX_OVERWRITE_BYTES}: "
            "use --update-weight-delta-encoding xor"
        )


def encode(old: Bytes, new: Bytes, encoding: Encoding) -> Change | None:
    """What turns ``old`` into ``new``; None if they are equal.

    Args:
        old: ``[N]`` bytes before.
        new: ``[N]`` bytes after.
        encoding: ``xor`` keeps ``old ^ new`` whole; ``overwrite`` keeps a count, the positions that differ and the
            bytes there.
    """
    difference = np.bitwise_xor(old, new)
    changed = int(np.count_nonzero(difference))
    if not changed:
        return None
    raw = difference if encoding == "xor" else _overwrite(np.flatnonzero(difference), new)
    compressed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(cast(Any, raw))
    return Change(np.frombuffer(compressed, dtype=np.uint8), changed)


def apply(target: Bytes, payload: Bytes, encoding: Encoding) -> None:
    """Turn the old bytes into the new ones, in place.

    Args:
        target: ``[N]`` old bytes; writable.
        payload: What ``encode`` made.
        encoding: How.

    Raises:
        ValueError: The payload is damaged or belongs to a tensor of another size; ``target`` may have changed.
    """
    try:
        raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(cast(Any, payload)), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"cannot be decompressed: {error}") from error
    if encoding == "xor":
        if raw.size != target.size:
            raise ValueError(f"is for {raw.size} bytes, the tensor has {target.size}")
        np.bitwise_xor(target, raw, out=target)
        return
    positions, values = _read_overwrite(raw)
    if positions.size and int(positions.max()) >= target.size:
        raise ValueError(f"writes at byte {int(positions.max())}, the tensor has {target.size}")
    target[positions] = values


def _overwrite(positions: NDArray[np.int64], new: Bytes) -> Bytes:
    count = np.array([positions.size], dtype=_COUNT)
    return np.concatenate([count.view(np.uint8), positions.astype(_COUNT).view(np.uint8), new[positions]])


def _read_overwrite(raw: Bytes) -> tuple[NDArray[np.uint32], Bytes]:
    width = _COUNT.itemsize
    count = int(raw[:width].view(_COUNT)[0]) if raw.size >= width else -1
    if raw.size != width + count * (width + 1):
        raise ValueError(f"has {raw.size} bytes, which do not fit its {count} positions")
    end = width * (count + 1)
    return raw[width:end].view(_COUNT), raw[end:]


def checksum(data: Bytes, checksum_format: ChecksumFormat) -> str:
    """Hex digits of a checksum over ``[N]`` bytes: 32 for xxh3-128, 64 for blake3, 8 for adler32."""
    content = cast(Any, data)
    if checksum_format == "xxh3-128":
        return xxhash.xxh3_128_hexdigest(content)
    if checksum_format == "blake3":
        return blake3(content).hexdigest()
    return f"{zlib.adler32(content):08x}"
