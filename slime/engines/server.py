"""A generation server: ``python -m slime.engines.server --model-path DIR --host H --port P``.

One process: the HTTP contract of ``slime.engines.api`` on the main thread, the embedded engine on another. Flag names
are SGLang's. It ends on SIGTERM, and by itself when the process that started it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from slime.engines.embedded.control import Control
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.flags import ServerFlags, parse_flags
from slime.engines.embedded.http_json import report_errors
from slime.engines.embedded.model import Decoder
from slime.engines.embedded.scheduler import Scheduler
from slime.engines.embedded.serving import Serving
from slime.engines.embedded.shape import DTYPES, ModelShape, read_shape
from slime.engines.embedded.text import Text
from slime.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 30
_PARENT_POLL_SECONDS = 1.0
_SHUTDOWN_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_MALLOPT = {"M_ARENA_MAX": (-8, 1), "M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}
_SHARED_PROMPT_TOKENS = 256
"""From here on one copy of a prompt for all its rows is faster than a copy per row, measured on a CPU."""


def build_app(flags: ServerFlags) -> tuple[web.Application, Engine]:
    """Load the model and put the HTTP contract over it; the engine starts and stops with the application.

    Raises:
        ConfigError: The model directory or a flag does not fit.
    """
    started = time.monotonic()
    shape = read_shape(flags.model_path)
    device = torch.device(flags.device)
    dtype = shape.dtype if flags.dtype == "auto" else DTYPES[flags.dtype]
    model = Decoder(shape, dtype=dtype, device=device)
    model.weights.load(flags.model_path)
    context_length = flags.context_length or shape.max_positions
    max_total_tokens = flags.max_total_tokens or _default_tokens(
        shape, dtype, device, context_length, flags.mem_fraction_static
    )
    scheduler = Scheduler(
        model,
        max_total_tokens=max_total_tokens,
        max_running_requests=flags.max_running_requests,
        prefill_tokens=flags.chunked_prefill_size or (512 if device.type == "cpu" else 4096),
        share_from_tokens=_SHARED_PROMPT_TOKENS,
        enable_prefix_cache=not flags.disable_radix_cache,
    )
    engine = Engine(model, scheduler, weight_version=flags.weight_version, num_threads=flags.num_threads)
    tokenizer_path = None if flags.skip_tokenizer_init else (flags.tokenizer_path or flags.model_path)
    text = Text(tokenizer_path, trust_remote_code=flags.trust_remote_code)
    info = _server_info(flags, model) | {
        "tokenizer_path": tokenizer_path,
        "context_length": context_length,
        "max_total_num_tokens": max_total_tokens,
        "startup_time": time.monotonic() - started,
    }
    eos_ids = (*shape.eos_token_ids, *text.eos_ids())
    serving = Serving(
        engine, text, context_length=context_length, eos_ids=eos_ids, seed=flags.random_seed or 0, info=info
    )
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[report_errors])
    for methods, path, handler in [*serving.routes(), *Control(engine).routes()]:
        for method in methods:
            app.router.add_route(method, path, handler)

    async def start(_: web.Application) -> None:
        engine.start()
        text.start_loading()

    async def stop(_: web.Application) -> None:
        await asyncio.to_thread(engine.stop, _SHUTDOWN_SECONDS)

    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    return app, engine


def _server_info(flags: ServerFlags, model: Decoder) -> dict[str, Any]:
    """What ``/server_info`` says about flags and model."""
    return flags.as_dict() | {
        "version": "slime-embedded",
        "engine": "embedded",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "served_model_name": flags.served_model_name or flags.model_path,
        "model_type": model.shape.model_type,
        "architectures": [model.shape.architecture],
        "load_format": "auto",
        **dict.fromkeys(("tp_size", "dp_size", "pp_size", "ep_size"), 1),
    }


def _default_tokens(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, context_length: int, fraction: float | None
) -> int:
    """Tokens of key-value memory that fit into a share of the free memory; at least one full context."""
    per_token = shape.cache.bytes_per_token(dtype)
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else _available_bytes()
    return max(int(free * (fraction or 0.25)) // per_token, 2 * context_length)


def _available_bytes() -> int:
    """Memory that programs can still take; the page cache counts as free where the system tells."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop."""
    parent = os.getppid()
    try:
        flags = parse_flags(sys.argv[1:] if argv is None else argv)
        logging.basicConfig(level=flags.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        _tune_malloc()
        app, _ = build_app(flags)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        asyncio.run(_serve(app, flags, parent))
    except OSError as error:
        sys.stderr.write(f"--host {flags.host} --port {flags.port}: {error}\n")
        return 1
    return 0


async def _serve(app: web.Application, flags: ServerFlags, parent: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    await web.TCPSite(runner, flags.host, flags.port, backlog=1024, reuse_address=True).start()
    sys.stdout.write(f"slime engine ready: {flags.model_path} on http://{flags.host}:{flags.port}\n")
    sys.stdout.flush()
    watch = asyncio.create_task(_watch_parent(parent, stop)) if parent > 1 and not flags.outlive_parent else None
    await stop.wait()
    if watch is not None:
        watch.cancel()
    # A second signal, or a shutdown that hangs, must not keep the port: leave by force after the bound.
    loop.call_later(2 * _SHUTDOWN_SECONDS, os._exit, 1)
    await runner.cleanup()


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    """Set ``stop`` when the process that started this one is gone.

    The kernel's signal arrives at once, but also when merely the thread that started us ends; so it only makes us look.
    """
    changed = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, changed.set)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    while os.getppid() == parent:
        changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), _PARENT_POLL_SECONDS)
    logger.warning("the parent process %d has ended; stopping", parent)
    stop.set()


def _tune_malloc() -> None:
    """Keep freed memory for the next step.

    The worker's buffers of every step are above the default thresholds, so each would be mapped and unmapped anew and
    its pages zeroed by the kernel each time. Released memory is trimmed explicitly.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for option, value in _MALLOPT.values():
        libc.mallopt(option, value)


if __name__ == "__main__":
    sys.exit(main())
