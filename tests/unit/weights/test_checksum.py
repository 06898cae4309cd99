"""Checksums tell apart what differs and agree on what is equal."""

import pytest
import torch

from slime.weights.checksum import tensor_checksum


def test_known_value() -> None:
    # xxh3-128 of "torch.float32[2]" followed by the eight bytes of two ones.
    import xxhash

    expected = xxhash.xxh3_128_hexdigest(b"torch.float32[2]" + b"\x00\x00\x80?\x00\x00\x80?")
    assert tensor_checksum(torch.ones(2)) == expected


def test_views_sum_like_their_copies() -> None:
    base = torch.randn(6, 8)
    assert tensor_checksum(base.t()) == tensor_checksum(base.t().clone())
    assert tensor_checksum(base[::2, 1:3]) == tensor_checksum(base[::2, 1:3].contiguous())


def test_value_dtype_and_shape_count() -> None:
    base = torch.arange(6, dtype=torch.float32)
    different = [base, base.clone().add_(torch.tensor([0, 0, 0, 0, 0, 1e-6])), base.view(2, 3), base.double()]
    different += [
        base.bfloat16(),
        base.half(),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.tensor(1.0),
        torch.tensor([1.0]),
    ]
    assert len({tensor_checksum(tensor) for tensor in different}) == len(different)


def test_negative_zero_and_nan_are_bits() -> None:
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert tensor_checksum(nan) == tensor_checksum(nan.clone())


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="CPU tensor"):
        tensor_checksum(torch.empty(2, device="meta"))
