"""A patch of the old bytes gives the new bytes, for any bytes; checksums are those of independent implementations."""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
from typing import Any, get_args

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import WeightSyncError
from slime.weights.delta_encoding import (
    MAX_OVERWRITE_BYTES,
    ChecksumFormat,
    Encoding,
    apply,
    check_size,
    checksum,
    encode,
)

ENCODINGS = get_args(Encoding)


def as_bytes(values: Any) -> np.ndarray[Any, Any]:
    return np.array(list(values), dtype=np.uint8)


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two versions of a tensor's bytes: unrelated ones, and ones that differ in few places."""
    size = draw(st.integers(0, 300))
    old = draw(st.binary(min_size=size, max_size=size))
    if draw(st.booleans()):
        return as_bytes(old), as_bytes(draw(st.binary(min_size=size, max_size=size)))
    new = bytearray(old)
    for position in draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=5)):
        if size:
            new[position] ^= draw(st.integers(0, 255))
    return as_bytes(old), as_bytes(new)


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=100, deadline=None)
@given(pair=versions())
def test_the_patched_old_is_the_new(encoding: Encoding, pair: tuple[Any, Any]) -> None:
    old, new = pair
    differing = sum(a != b for a, b in zip(old.tolist(), new.tolist(), strict=True))
    change = encode(old, new, encoding)
    if change is None:
        assert differing == 0
        return
    assert change.changed_bytes == differing > 0
    target = old.copy()
    apply(target, change.payload, encoding)
    assert target.tobytes() == new.tobytes()


def test_the_documented_example() -> None:
    old, new = as_bytes([1, 2, 3, 4]), as_bytes([1, 9, 3, 5])
    xor, overwrite = encode(old, new, "xor"), encode(old, new, "overwrite")
    assert xor is not None
    assert overwrite is not None
    assert zstandard.decompress(xor.payload.tobytes()) == bytes([0, 11, 0, 1])
    assert zstandard.decompress(overwrite.payload.tobytes()) == struct.pack("<III", 2, 1, 3) + bytes([9, 5])


@pytest.mark.skipif(shutil.which("zstd") is None, reason="the zstd program is not installed")
def test_the_zstd_program_reads_a_payload() -> None:
    change = encode(as_bytes([0] * 100), as_bytes(range(100)), "xor")
    assert change is not None
    raw = subprocess.run(["zstd", "-dc"], input=change.payload.tobytes(), capture_output=True, check=True, timeout=10)
    assert raw.stdout == bytes(range(100))


def test_checksums_are_the_published_ones() -> None:
    data = b"Wikipedia"
    assert checksum(as_bytes(data), "adler32") == "11e60398"  # the example of its article
    assert checksum(as_bytes(b""), "adler32") == "00000001"
    assert checksum(as_bytes(b""), "xxh3-128") == "99aa06d3014798d86001c324468d497f"  # of its reference implementation
    # First of the test vectors published with BLAKE3.
    assert checksum(as_bytes(b""), "blake3") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.mark.parametrize("name", get_args(ChecksumFormat))
def test_any_changed_bit_changes_the_checksum(name: ChecksumFormat) -> None:
    data = as_bytes(hashlib.sha512(b"slime").digest())
    before = checksum(data, name)
    for position in range(data.size):
        data[position] ^= 1
        assert checksum(data, name) != before
        data[position] ^= 1
    assert checksum(data, name) == before


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damaged_payloads_are_refused(encoding: Encoding) -> None:
    old, new = as_bytes(range(64)), as_bytes(range(1, 65))
    change = encode(old, new, encoding)
    assert change is not None
    with pytest.raises(ValueError, match="decompressed"):
        apply(old.copy(), change.payload[:-3], encoding)
    with pytest.raises(ValueError, match=r"the tensor has 63|for 64 bytes"):
        apply(old[:63].copy(), change.payload, encoding)


def test_an_overwrite_whose_count_does_not_fit_is_refused() -> None:
    for raw in (b"", b"\x01\x00", struct.pack("<II", 2, 0) + b"x"):
        payload = np.frombuffer(zstandard.compress(raw), dtype=np.uint8)
        with pytest.raises(ValueError, match="do not fit"):
            apply(as_bytes([0] * 8), payload, "overwrite")


def test_what_overwrite_cannot_address_is_refused_at_once() -> None:
    check_size(MAX_OVERWRITE_BYTES, "overwrite", "w")
    check_size(2**40, "xor", "w")
    with pytest.raises(WeightSyncError, match=r"tensor w .*4294967296 .*--update-weight-delta-encoding xor"):
        check_size(2**32, "overwrite", "w")
