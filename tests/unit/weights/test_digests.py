"""The checksums of SGLang."""

import hashlib

import pytest
import torch
from torch import Tensor

from slime.weights.digests import CpuDigest, CudaDigest, Digest


def values(count: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(count) % 97 - 40).to(dtype) / 7).to(dtype)


def digest_of(kind: type[Digest], *parts: Tensor) -> str:
    digest = kind()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


# What SGLang 0.5.23's own Triton kernel (gpu_tensor_hash) gives for ``values``, run by Triton's interpreter.
FROM_SGLANG = [
    (1, torch.bfloat16, "baa519e2e19d9c44"),
    (5, torch.bfloat16, "88a8e140af8cd757"),
    (100, torch.float32, "ec7fc7e678bc909b"),
    (8192, torch.float32, "71bcd74ef5f9183a"),
    (20001, torch.bfloat16, "9a5e027adc139e7e"),
    (50000, torch.float32, "83dcfe06262279ae"),
]


@pytest.mark.parametrize(("count", "dtype", "expected"), FROM_SGLANG)
def test_cuda_digest_is_that_of_the_kernel(count: int, dtype: torch.dtype, expected: str) -> None:
    assert digest_of(CudaDigest, values(count, dtype)) == expected


def test_cuda_digest_of_more_than_one_chunk_follows_the_definition() -> None:
    """Word by word with Python integers; three tiles, and chunks of one tile."""
    words = 2 * 8192 + 77
    data = torch.arange(words, dtype=torch.int32) * 2654435761 % 1000003
    expected = by_definition([int(word) for word in data.to(torch.int32)])
    pieces = data.to(torch.int32).split(5000)
    assert digest_of(CudaDigest, *pieces) == expected


def by_definition(words: list[int]) -> str:
    mask = 2**32 - 1

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & mask
        x ^= x >> 13
        x = x * 0xC2B2AE35 & mask
        return x ^ x >> 16

    def turn(x: int, by: int) -> int:
        return (x << by | x >> (32 - by)) & mask

    seed = 0x243F6A88
    seeds = (seed, (seed * 0x9E3779B1 ^ 0xDEADBEEF) & mask)
    total = 0
    for tile in range(0, len(words), 8192):
        sums = [0, 0]
        for position in range(tile, min(tile + 8192, len(words))):
            for i, (factor, by) in enumerate(((0x27D4EB2D, 15), (0x165667B1, 13))):
                place = (position * factor + seeds[i] & mask) ^ turn(position, by)
                sums[i] = sums[i] + mix((words[position] & mask) ^ place) & mask
        first, second = (mix(s ^ (4 * len(words) & mask)) for s in sums)
        total = total + (first << 32 | second) & (2**64 - 1)
    total ^= total >> 30
    total = total * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    total ^= total >> 27
    total = total * 0x94D049BB133111EB & (2**64 - 1)
    return f"{total ^ total >> 31:016x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpu_digest_is_the_beginning_of_sha256_of_the_bytes(dtype: torch.dtype) -> None:
    tensor = values(1001, dtype)
    raw = bytes(tensor.view(torch.uint8).tolist())
    assert digest_of(CpuDigest, tensor) == hashlib.sha256(raw).hexdigest()[:16]


@pytest.mark.parametrize("kind", [CpuDigest, CudaDigest])
def test_parts_give_what_the_whole_gives(kind: type[Digest]) -> None:
    tensor = values(21 * 1000, torch.bfloat16).view(21, 1000)
    whole = digest_of(kind, tensor)
    assert digest_of(kind, *tensor.split([1, 7, 13])) == whole
    assert digest_of(kind, *tensor.view(-1).split([3, 8190, 1, 5000, 7806])) == whole
    assert digest_of(kind, tensor.t().contiguous().t()) == whole, "a view counts in row-major order"
    changed = tensor.clone()
    changed[20, 999] += 1
    assert digest_of(kind, changed) != whole


def test_nothing_sums_up_to_zero_on_cuda() -> None:
    assert digest_of(CudaDigest, torch.empty(0)) == "0" * 16
