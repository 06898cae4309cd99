"""How SGLang sums up a tensor for ``/weights_checker``, so that its answer can be computed from what was sent.

Two definitions: on a CPU the first eight bytes of SHA-256; on CUDA sums of mixed 32-bit words, tile by tile. Both
are over the bytes in row-major order, without dtype or shape, and take a tensor part by part. Tests hold: parts give
what the whole gives, and both agree with a real server's answer or with the definition written out word by word.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

_MASK = 0xFFFFFFFF
_MASK_64 = (1 << 64) - 1
_WORD_BYTES = 4
_TILE_WORDS = 8192
_CHUNK_TILES = 512
"""Tiles at a time: 16 MiB of a tensor, so that the intermediate values stay small beside it."""
_SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK)
_POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
_POSITION_TURNS = (15, 13)
_MIX_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
_FINISH_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Digest(Protocol):
    """A checksum in the making."""

    def update(self, part: Tensor) -> None:
        """Take the next bytes: those of ``part``, any shape and dtype, in row-major order."""
        ...

    def hexdigest(self) -> str:
        """16 hex digits; nothing may be added afterwards."""
        ...


class CpuDigest(Digest):
    """What an SGLang server on a CPU answers."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    @override
    def update(self, part: Tensor) -> None:
        self._hash.update(cast(Any, _bytes_of(part).cpu().numpy()))

    @override
    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]


class CudaDigest(Digest):
    """What an SGLang server on CUDA answers; computed where the parts are."""

    def __init__(self) -> None:
        self._words = 0
        self._tiles: Tensor | None = None
        """``[2, N]`` int64: sums of mixed words per tile, modulo 2^32 at the end."""
        self._rest: Tensor | None = None
        """Up to three bytes after the last whole word."""

    @override
    def update(self, part: Tensor) -> None:
        data = _bytes_of(part)
        if self._rest is not None:
            data = torch.cat([self._rest.to(data.device), data])
        whole = data.numel() // _WORD_BYTES * _WORD_BYTES
        self._rest = data[whole:].clone() if whole < data.numel() else None
        words = data[:whole].view(torch.int32)
        for start in range(0, words.numel(), _CHUNK_TILES * _TILE_WORDS):
            self._add(words[start : start + _CHUNK_TILES * _TILE_WORDS])

    @override
    def hexdigest(self) -> str:
        if self._rest is not None:
            word = F.pad(self._rest, (0, _WORD_BYTES - self._rest.numel()))
            self._add(word.view(torch.int32))
        if self._tiles is None:
            return f"{0:016x}"
        num_bytes = self._words * _WORD_BYTES & _MASK
        tiles = _mix((self._tiles & _MASK) ^ num_bytes)
        total = int(((tiles[0] << 32) | tiles[1]).sum().item())  # wraps at 2^64, as it does there
        return f"{_finish(total & _MASK_64):016x}"

    def _add(self, words: Tensor) -> None:
        if not words.numel():
            return
        sums = _tile_sums(words, self._words)
        first = self._words // _TILE_WORDS
        self._words += words.numel()
        known = 0 if self._tiles is None else self._tiles.size(1)
        end = first + sums.size(1)
        if self._tiles is None:
            self._tiles = torch.zeros_like(sums)
        elif end > known:
            self._tiles = F.pad(self._tiles, (0, end - known))
        self._tiles[:, first:end] += sums.to(self._tiles.device)


def _tile_sums(words: Tensor, start: int) -> Tensor:
    """Sums of mixed words ``[2, tiles]`` of consecutive words ``[N]`` int32, the first at position ``start``."""
    values = words.to(torch.int64) & _MASK
    index = torch.arange(start, start + words.numel(), device=words.device) & _MASK
    before = start % _TILE_WORDS
    after = -(before + words.numel()) % _TILE_WORDS
    sums: list[Tensor] = []
    for factor, seed, turn in zip(_POSITION_FACTORS, _SEEDS, _POSITION_TURNS, strict=True):
        turned = ((index << turn) | (index >> (32 - turn))) & _MASK
        position = (index * factor + seed & _MASK) ^ turned
        mixed = F.pad(_mix(values ^ position), (before, after))
        sums.append(mixed.view(-1, _TILE_WORDS).sum(1))
    return torch.stack(sums)


def _mix(words: Tensor) -> Tensor:
    """The finaliser of 32-bit MurmurHash3, over int64 that hold unsigned 32-bit words."""
    words = words ^ (words >> 16)
    words = words * _MIX_FACTORS[0] & _MASK
    words = words ^ (words >> 13)
    words = words * _MIX_FACTORS[1] & _MASK
    return words ^ (words >> 16)


def _finish(value: int) -> int:
    """The finaliser of SplitMix64."""
    value ^= value >> 30
    value = value * _FINISH_FACTORS[0] & _MASK_64
    value ^= value >> 27
    value = value * _FINISH_FACTORS[1] & _MASK_64
    return value ^ value >> 31


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
