"""SGLang's checksum of tensors on CUDA, computed on the device: the bits are those of the CPU."""

import pytest
import torch

from slime.weights.digests import CudaDigest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# What SGLang 0.5.23's own Triton kernel (gpu_tensor_hash) gives, run by Triton's interpreter.
FROM_SGLANG = [(20001, torch.bfloat16, "9a5e027adc139e7e"), (50000, torch.float32, "83dcfe06262279ae")]


@pytest.mark.parametrize(("count", "dtype", "expected"), FROM_SGLANG)
def test_digest_on_the_device(count: int, dtype: torch.dtype, expected: str) -> None:
    values = ((torch.arange(count) % 97 - 40).to(dtype) / 7).to(dtype).cuda()
    digest = CudaDigest()
    for part in values.split(7001):
        digest.update(part)
    assert digest.hexdigest() == expected


def test_a_large_tensor_gives_the_same_on_both_devices() -> None:
    tensor = torch.randn(3000, 2048, dtype=torch.bfloat16, device="cuda")
    found: list[str] = []
    for copy in (tensor, tensor.cpu()):
        digest = CudaDigest()
        digest.update(copy)
        found.append(digest.hexdigest())
    assert found[0] == found[1]
