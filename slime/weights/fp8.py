"""Weights that a checkpoint stores in 8 bits: what they mean.

Owns the block-scaled form of DeepSeek's checkpoints. Writing it is not supported. Tests hold: every block,
whole or cut off at an edge, gets its own scale.
"""

from torch import Tensor

SCALE_SUFFIX = "_scale_inv"
BLOCK = 128


def dequantize_blocks(weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply every block of 128 x 128 elements by its scale.

    Args:
        weight: ``[R, C]`` float8.
        scales: ``[ceil(R / 128), ceil(C / 128)]`` fp32.

    Returns:
        ``[R, C]`` fp32.
    """
    rows, columns = weight.shape
    spread = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * spread
