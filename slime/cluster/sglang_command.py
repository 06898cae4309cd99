"""How a stock SGLang server is told what it shall be: flags, and on a CPU its environment. Pure functions.

Tests hold: every flag of the installed version's parser can be written, and what a user gives wins over a preset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime.config import Config
from slime.config.engine_flags import SGLANG_FLAGS
from slime.config.hf import HfModel
from slime.config.sglang_names import SGLANG_OPTIONS

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_CACHE_BYTES = 2 << 30
_MOST_TOKENS = 1 << 18
_MOST_REQUESTS = 128


def sglang_flags(values: Mapping[str, Any]) -> list[str]:
    """``--name value`` tokens for SGLang's parser.

    Args:
        values: By attribute name. None is left out, True is a bare flag, False is ``--no-name`` for a flag that has
            both forms and left out otherwise, a list has several values, an object is written as JSON.
    """
    tokens: list[str] = []
    for name, value in values.items():
        option = SGLANG_OPTIONS.get(name, name.replace("_", "-"))
        if value is False and SGLANG_FLAGS.get(name) == "pair":
            tokens.append(f"--no-{option}")
        elif value is True:
            tokens.append(f"--{option}")
        elif isinstance(value, Mapping):
            tokens += [f"--{option}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            tokens += [f"--{option}", *map(str, value)]
        elif value is not None and value is not False:
            tokens += [f"--{option}", str(value)]
    return tokens


def cpu_presets(config: Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """What SGLang is told on a machine without GPU where the user says nothing.

    Left alone it plans for all memory of the machine and for kernels of the newest CPUs, and its scheduler spins.

    Args:
        config: Resolved configuration.
        given: What the user says, by attribute name.
    """
    presets: dict[str, Any] = {
        "attention_backend": "torch_native",
        "sleep_on_idle": True,
        "max_running_requests": min(config.engine.sglang_server_concurrency, _MOST_REQUESTS),
    }
    if given.get("mem_fraction_static") is None:
        presets["max_total_tokens"] = _cache_tokens(config.hf, config.train.precision, given.get("context_length"))
    return {name: value for name, value in presets.items() if given.get(name) is None}


def cpu_environment(*, first: int, ranks: int, num_processes: int, cores: Sequence[int]) -> dict[str, str]:
    """Environment of a server on a machine without GPU: its CPU platform, and a share of the cores for each process.

    Args:
        first: Scheduler processes of the engines before it.
        ranks: Scheduler processes of the engine.
        num_processes: Scheduler processes of all engines that share the machine.
        cores: Cores that may be used.
    """
    shares = [",".join(str(core) for core in _share(cores, first + rank, num_processes)) for rank in range(ranks)]
    return {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "|".join(shares)}


def _share(cores: Sequence[int], position: int, total: int) -> Sequence[int]:
    """Cores of one of ``total`` processes: a part of its own, or one that it shares where there are too few."""
    size = len(cores) // total
    return cores[position * size : (position + 1) * size] if size else cores[position % len(cores) :][:1]


def _cache_tokens(hf: HfModel | None, precision: str, context_length: int | None) -> int:
    """Tokens whose keys and values fit into a bounded piece of memory; at least two whole contexts of usual length."""
    if hf is None:
        return _MOST_TOKENS
    layers = int(hf["num_hidden_layers"])
    if hf.get("kv_lora_rank"):
        per_layer = int(hf["kv_lora_rank"]) + int(hf.get("qk_rope_head_dim", 0))
    else:
        per_layer = 2 * int(hf["num_key_value_heads"]) * int(hf["head_dim"])
    context = min(context_length or int(hf.get("max_position_embeddings", 4096)), 32768)
    return max(min(_CACHE_BYTES // (layers * per_layer * _BYTES[precision]), _MOST_TOKENS), 2 * context)
