"""Settings of NCCL in processes that join a group of weights; read before torch is loaded."""

from __future__ import annotations

import os

from slime.config import Config

_SETTINGS = {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
"""Multicast over NVLink reserves memory on every GPU and fails on hosts that lend single GPUs; one source gains nothing
by it. NCCL reads them once, so they hold for the other groups of the process as well."""


def nccl_environment(config: Config) -> dict[str, str]:
    """What to add to the environment of trainers and engines; what the user has set stays as it is."""
    if config.cluster.device != "cuda":
        return {}
    return {name: value for name, value in _SETTINGS.items() if name not in os.environ}
