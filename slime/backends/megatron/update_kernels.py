"""The optimizer's part of a step in few kernels, on CUDA without Transformer Engine and Apex.

Without them Megatron takes torch's AdamW, which by default goes over every parameter once per operation, and
measures and clips gradients one tensor after the other, waiting for the device at each. Owns the switch to
torch's fused kernels. The one of Adam is made again after a checkpoint was loaded, which brings the options
it was written with. Tests hold: the update is the default's but for rounding, also after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import clip_grads
from torch import Tensor


def fuse_updates(optimizer: Any) -> None:
    """Let every AdamW of Megatron's optimizer update in one kernel; others stay as they are."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.Adam):  # AdamW is one
            _fuse(part.optimizer)


def _fuse(adam: torch.optim.Adam) -> None:
    for group in adam.param_groups:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"]:
            state = adam.state.get(parameter, {})
            if "step" in state:  # the kernel reads it, so it has to be where the parameter is
                state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)


def fuse_clipping() -> None:
    """Replace Megatron's own loops over gradients (0.19.x), if it uses them; a second call changes nothing."""
    if clip_grads.l2_norm_impl is megatron_utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_all
    if clip_grads.multi_tensor_scale_impl is megatron_utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale_all


def norm_of_all(
    chunk_size: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """``[1]`` norm of all tensors together; the arguments are Apex's."""
    norms = torch._foreach_norm([tensor for tensors in lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms)).float()[None], None


def scale_all(chunk_size: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """Write the first list times ``scale`` over the second; the arguments are Apex's."""
    sources, targets = (list(tensors) for tensors in lists)
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))
