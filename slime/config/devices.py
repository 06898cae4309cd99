"""How many CUDA devices a process may use, without importing an accelerator library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def count_cuda_devices(environment: Mapping[str, str], device_folder: Path = Path("/dev")) -> int:
    """Count the NVIDIA devices of this machine that ``CUDA_VISIBLE_DEVICES`` leaves visible.

    Args:
        environment: Environment variables.
        device_folder: Where device files are.
    """
    present = 0
    if device_folder.is_dir():
        present = sum(1 for entry in device_folder.iterdir() if re.fullmatch(r"nvidia\d+", entry.name))
        # WSL shows one device file for all GPUs.
        if present == 0 and (device_folder / "dxg").exists():
            present = 1
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [item for item in visible.split(",") if item.strip() not in ("", "-1")]
    return min(present, len(named))
