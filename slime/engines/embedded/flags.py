"""Command line of the embedded engine's server: SGLang's flag names, strictly checked."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

import torch

from slime.engines.embedded.shape import DTYPES
from slime.errors import ConfigError

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = (
    *("cuda-graph-max-bs", "cuda-graph-max-bs-decode", "cuda-graph-bs", "disable-cuda-graph", "attention-backend"),
    *("disable-overlap-schedule", "disable-prefill-cuda-graph", "disable-piecewise-cuda-graph", "page-size"),
    *("max-prefill-tokens", "schedule-conservativeness", "sampling-backend", "grammar-backend", "enable-metrics"),
    *("watchdog-timeout", "dist-timeout", "skip-server-warmup", "enable-memory-saver", "base-gpu-id", "gpu-id-step"),
    *("enable-draft-weights-cpu-backup", "enable-deterministic-inference", "disable-custom-all-reduce"),
    *("nccl-port", "dist-init-addr", "enable-return-routed-experts"),
)
"""SGLang flags that change no answer here: speed, memory, placement, and what is always on; logged when given."""
_ONLY_ONE = ("tp-size", "tensor-parallel-size", "dp-size", "pp-size", "ep-size", "nnodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFlags:
    """Checked command line."""

    model_path: str
    tokenizer_path: str | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str = "auto"
    device: str = "cpu"
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    max_running_requests: int = 256
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    disable_radix_cache: bool = False
    random_seed: int | None = None
    weight_version: str = "default"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    num_threads: int | None = None
    outlive_parent: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name in (
            "max_total_tokens",
            "max_running_requests",
            "context_length",
            "chunked_prefill_size",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"--{name.replace('_', '-')} is {value}; accepted: an integer >= 1")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            problems.append(f"--mem-fraction-static is {self.mem_fraction_static}; accepted: a number in (0, 1)")
        if self.device == "cuda" and not torch.cuda.is_available():
            problems.append("--device cuda, but torch finds no CUDA device; use --device cpu")
        if problems:
            raise ConfigError(problems)

    def as_dict(self) -> dict[str, Any]:
        """All values by name."""
        return asdict(self)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m slime.engines.server --help")


def parse_flags(argv: Sequence[str]) -> ServerFlags:
    """Parse the command line.

    Raises:
        ConfigError: An unknown flag or a value that is not accepted.
    """
    parser = _Parser(prog="python -m slime.engines.server", allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    add("--model-path", "--model", required=True, help="Hugging Face model directory")
    add("--tokenizer-path", help="directory of the tokenizer; the model's by default")
    add("--served-model-name", help="name in /v1/models; the model path by default")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: that of config.json")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add("--max-total-tokens", type=int, help="tokens of KV cache; by default what fits a share of the free memory")
    add("--mem-fraction-static", type=float, help="that share, 0.25 by default")
    add("--max-running-requests", type=int, default=256)
    add("--context-length", type=int, help="longest prompt plus output; that of config.json by default")
    add("--chunked-prefill-size", type=int, help="most prompt tokens per step")
    add("--disable-radix-cache", action="store_true", help="do not keep prompts for later requests")
    add("--random-seed", type=int, help="seed of requests that bring none")
    add("--weight-version", default="default", help="name of the weights at start")
    add("--skip-tokenizer-init", action="store_true", help="token ids in, token ids out; no text")
    add("--trust-remote-code", action="store_true", help="allow code in the tokenizer's directory to run")
    add("--num-threads", type=int, help="compute threads; OMP_NUM_THREADS or all cores by default")
    add("--outlive-parent", action="store_true", help="keep running when the process that started this one ends")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    for name in _WITHOUT_EFFECT:
        add(f"--{name}", nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name in _ONLY_ONE:
        add(f"--{name}", type=int, choices=[1], default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    values = vars(parser.parse_args(list(argv)))
    if values["device"] == "auto":
        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    known = {field.name for field in fields(ServerFlags)}
    ignored = sorted(name.replace("_", "-") for name in values if name not in known)
    if ignored:
        logger.info("flags without effect on the embedded engine: %s", ", ".join(f"--{name}" for name in ignored))
    return ServerFlags(**{name: value for name, value in values.items() if name in known})
