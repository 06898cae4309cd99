"""Block-scaled 8-bit weights against the product written out element by element."""

from __future__ import annotations

import torch

from slime.weights.fp8 import dequantize_blocks


def test_each_element_gets_the_scale_of_its_block() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(130, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    found = dequantize_blocks(weight, scales)
    assert found.dtype == torch.float32
    for row in (0, 127, 128, 129):
        for column in (0, 127, 128, 255, 256, 299):
            assert found[row, column] == weight[row, column].float() * scales[row // 128, column // 128]
