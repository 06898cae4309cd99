"""Command lines of engine processes, from the configuration. Pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slime.cluster.sglang_command import cpu_environment, cpu_presets, sglang_flags
from slime.config import Config
from slime.config.embedded_flags import embedded_values

_MODULES = {"embedded": "slime.engines.server", "sglang": "sglang.launch_server"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def engine_command(config: Config, *, index: int, host: str, port: int, base_gpu_id: int) -> list[str]:
    """Command line of one engine.

    Args:
        config: Resolved configuration.
        index: Number of the engine; shifts its seed.
        host: Address to bind.
        port: Port to bind.
        base_gpu_id: First GPU on its node; ignored on a CPU.
    """
    backend = config.engine.rollout_backend
    assert backend in _MODULES, f"--rollout-backend {backend} was not resolved"
    gpus = config.cluster.rollout_num_gpus_per_engine
    values: dict[str, Any] = {
        "model_path": config.rollout.hf_checkpoint,
        "host": host,
        "port": port,
        "device": config.cluster.device,
        "random_seed": config.rollout.rollout_seed + index * gpus,
        "dtype": _DTYPES[config.train.precision] if config.cluster.device == "cpu" else "auto",
    }
    if backend == "sglang":
        values |= {
            "trust_remote_code": True,
            "enable_memory_saver": bool(config.cluster.offload_rollout) and config.cluster.device == "cuda",
            "tp_size": gpus // int(config.sglang.get("pp_size", 1)),
            "base_gpu_id": base_gpu_id if config.cluster.device == "cuda" else 0,
            "gpu_id_step": 1,
            "skip_server_warmup": True,
            "enable_metrics": True,
        }
        if config.cluster.device == "cpu":
            values |= cpu_presets(config, config.sglang)
    values |= embedded_values(config.sglang) if backend == "embedded" else config.sglang
    if values.get("log_level"):
        values["log_level"] = str(values["log_level"]).lower()  # written in capitals in many launch scripts
    flags = sglang_flags(values) if backend == "sglang" else flags_of(values)
    return [sys.executable, "-m", _MODULES[backend], *flags]


def engine_environment(config: Config, *, index: int, num_engines: int, cores: Sequence[int]) -> dict[str, str]:
    """What the environment of one engine's process has besides ours.

    Args:
        config: Resolved configuration.
        index: Number of the engine.
        num_engines: Engines on the machine.
        cores: Cores that may be used.
    """
    if config.engine.rollout_backend != "sglang" or config.cluster.device != "cpu":
        return {}
    ranks = config.cluster.rollout_num_gpus_per_engine
    return cpu_environment(engine=index, num_engines=num_engines, ranks=ranks, cores=cores)


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
