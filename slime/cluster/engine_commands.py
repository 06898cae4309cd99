"""Command lines of engine processes, from the configuration and the plan. Pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.cluster.sglang_command import cpu_environment, cpu_presets, sglang_flags
from slime.config import Config
from slime.config.embedded_flags import embedded_values
from slime.config.engine_plan import PlannedEngine

_MODULES = {"embedded": "slime.engines.server", "sglang": "sglang.launch_server"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcessSetting:
    """What one process of an engine is told besides the configuration.

    Args:
        host: Address to bind.
        port: Port to bind.
        nccl_port: For its process group.
        base_gpu_id: Its first GPU, as the process counts them; ignored on a CPU.
        node_rank: Which of the engine's nodes.
        dist_init_addr: Where the engine's processes meet.
        bootstrap_port: Of a prefill engine.
        encoder_urls: Encoder engines that it uses.
    """

    host: str
    port: int
    nccl_port: int
    base_gpu_id: int = 0
    node_rank: int = 0
    dist_init_addr: str | None = None
    bootstrap_port: int | None = None
    encoder_urls: tuple[str, ...] = ()


def engine_command(config: Config, planned: PlannedEngine, setting: EngineProcessSetting) -> list[str]:
    """Command line of one process of an engine.

    Args:
        config: Resolved configuration.
        planned: The engine.
        setting: The process.
    """
    backend = config.engine.rollout_backend
    assert backend in _MODULES, f"--rollout-backend {backend} was not resolved"
    values: dict[str, Any] = {
        "model_path": planned.model_path,
        "host": setting.host,
        "port": setting.port,
        "device": config.cluster.device,
        "random_seed": planned.seed,
        "dtype": _DTYPES[config.train.precision] if config.cluster.device == "cpu" else "auto",
    }
    given = {**config.sglang, **planned.overrides}
    if backend == "sglang":
        values |= _sglang_values(config, planned, setting, given)
        if config.cluster.device == "cpu":
            values |= cpu_presets(config, given)
    values |= embedded_values(given) if backend == "embedded" else given
    if values.get("log_level"):
        values["log_level"] = str(values["log_level"]).lower()  # written in capitals in many launch scripts
    flags = sglang_flags(values) if backend == "sglang" else flags_of(values)
    return [sys.executable, "-m", _MODULES[backend], *flags]


def engine_environment(
    config: Config, planned: PlannedEngine, *, num_processes: int, cores: Sequence[int]
) -> dict[str, str]:
    """What the environment of one engine's process has besides ours.

    Args:
        config: Resolved configuration.
        planned: The engine.
        num_processes: Processes of all engines, which share the cores.
        cores: Cores that may be used.
    """
    if config.engine.rollout_backend != "sglang" or config.cluster.device != "cpu":
        return {}
    first = planned.slots[0] - config.layout.rollout[0]
    return cpu_environment(first=first, ranks=planned.num_gpus, num_processes=num_processes, cores=cores)


def _sglang_values(
    config: Config, planned: PlannedEngine, setting: EngineProcessSetting, given: Mapping[str, Any]
) -> dict[str, Any]:
    """What SGLang is told that follows from the run and from the kind of the engine."""
    saves_memory = planned.offloaded and config.cluster.device == "cuda"
    values: dict[str, Any] = {
        "trust_remote_code": True,
        "enable_memory_saver": saves_memory,
        # Weights that nobody sends again must survive a release of their memory.
        "enable_weights_cpu_backup": saves_memory and not planned.updatable,
        "tp_size": planned.num_gpus // int(given.get("pp_size", 1)),
        "base_gpu_id": setting.base_gpu_id if config.cluster.device == "cuda" else 0,
        "gpu_id_step": 1,
        "nnodes": len(planned.processes),
        "node_rank": setting.node_rank,
        "dist_init_addr": setting.dist_init_addr,
        "nccl_port": setting.nccl_port,
        "skip_server_warmup": True,
        "enable_metrics": True,
        "enable_return_routed_experts": config.algorithm.use_rollout_routing_replay and planned.updatable,
    }
    if planned.worker_type in ("prefill", "decode"):
        values["disaggregation_mode"] = planned.worker_type
    if setting.bootstrap_port is not None:
        values["disaggregation_bootstrap_port"] = setting.bootstrap_port
    if planned.worker_type == "encoder":
        values["encoder_only"] = True
    elif setting.encoder_urls:
        values |= {"language_only": True, "encoder_urls": list(setting.encoder_urls)}
    return values


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
