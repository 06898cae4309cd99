"""Adam's update in one kernel for many parameters: torch's AdamW, which Megatron takes without Apex, on CUDA.

Its default there goes over every parameter once per operation; the fused kernel reads and writes each once.
Owns the switch, which has to be made again after a checkpoint was loaded: a checkpoint brings the options it
was written with. Tests hold: the update is the default's but for rounding, also after a resume.
"""

from __future__ import annotations

from typing import Any

import torch


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
