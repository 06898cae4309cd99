"""What we send of weights, read by SGLang's own code without a server."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.weights.broadcast import laid_out
from slime.weights.flat import FlatBucket

NAMED = [
    ("a", torch.randn(3, 5).bfloat16()),
    ("b", torch.randn(7)),
    ("c", torch.zeros(0)),
    ("d", torch.randn(1)),
    ("e", torch.randn(2, 3, 4).half()),
]


def same(got: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> bool:
    return [name for name, _ in got] == [name for name, _ in expected] and all(
        a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(got, expected, strict=True)
    )


def test_pieces_in_memory_pass_its_restricted_unpickler() -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlatBucket(NAMED)
    try:
        for note in bucket.payloads(2):
            value: Any = MultiprocessingSerializer.deserialize(note)
            tensors = FlattenedTensorBucket(flattened_tensor=value["flattened_tensor"], metadata=value["metadata"])
            assert same(tensors.reconstruct_tensors(), NAMED)
    finally:
        bucket.free()


def test_broadcast_pieces_lie_where_it_expects_them() -> None:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat, message = laid_out(NAMED)
    bucket = FlattenedTensorBucket.empty(message["names"], message["dtypes"], message["shapes"], "cpu")
    assert bucket.get_flattened_tensor().shape == flat.shape
    bucket.get_flattened_tensor().copy_(flat)
    assert same(sorted(bucket.reconstruct_tensors()), NAMED)
