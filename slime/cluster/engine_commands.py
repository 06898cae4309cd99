"""Command lines of engine processes, from the configuration. Pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from slime.config import Config
from slime.errors import ConfigError

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_backend(config: Config, *, sglang_installed: bool) -> str:
    """``embedded`` or ``sglang``; ``auto`` means SGLang on CUDA where it is installed."""
    chosen = config.engine.rollout_backend
    if chosen == "auto":
        return "sglang" if config.cluster.device == "cuda" and sglang_installed else "embedded"
    if chosen == "sglang" and not sglang_installed:
        raise ConfigError("--rollout-backend sglang needs the package sglang, which is not installed")
    return chosen


def engine_command(config: Config, backend: str, *, index: int, host: str, port: int, base_gpu_id: int) -> list[str]:
    """Command line of one engine.

    Args:
        config: Resolved configuration.
        backend: ``embedded`` or ``sglang``.
        index: Number of the engine; shifts its seed.
        host: Address to bind.
        port: Port to bind.
        base_gpu_id: First GPU on its node; ignored on a CPU.
    """
    module = "slime.engines.server" if backend == "embedded" else "sglang.launch_server"
    gpus = config.cluster.rollout_num_gpus_per_engine
    values: dict[str, Any] = {
        "model_path": config.rollout.hf_checkpoint,
        "host": host,
        "port": port,
        "device": config.cluster.device,
        "random_seed": config.megatron.seed + index * gpus,
        "dtype": _DTYPES[config.train.precision] if config.cluster.device == "cpu" else "auto",
    }
    if backend == "sglang":
        values |= {
            "trust_remote_code": True,
            "enable_memory_saver": bool(config.cluster.offload_rollout),
            "tp_size": gpus // int(config.sglang.get("pp_size", 1)),
            "base_gpu_id": base_gpu_id if config.cluster.device == "cuda" else 0,
            "gpu_id_step": 1,
            "skip_server_warmup": True,
            "enable_metrics": True,
        }
    values |= config.sglang
    if values.get("log_level"):
        values["log_level"] = str(values["log_level"]).lower()  # written in capitals in many launch scripts
    return [sys.executable, "-m", module, *flags_of(values)]


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """``--name value`` tokens: True is a bare flag, False and None are left out, a list has several values."""
    tokens: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        tokens.append(f"--{name.replace('_', '-')}")
        if value is not True:
            tokens.extend(str(v) for v in value) if isinstance(value, list | tuple) else tokens.append(str(value))
    return tokens
