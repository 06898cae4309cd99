"""Stock SGLang servers on this CPU for tests: started on free ports, waited for, and ended whatever happens.

Run by an interpreter that has SGLang installed (``make test-sglang`` uses ``.venv-sglang``). A server of a tiny model
takes 15 to 60 seconds to start and 2 GB of memory: share one where a test does not change it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil

from tests.support.gloo import free_port

START_SECONDS = 150.0
_END_SECONDS = 20.0
_SHIM = Path(__file__).parent / "shim"
_SHARED_MEMORY = "/dev/shm/sglang_loads_"

CPU_FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--max-total-tokens", "16384",
    "--max-running-requests", "64", "--sleep-on-idle", "--skip-server-warmup",
)  # fmt: skip
"""What a server on this machine needs: bounded memory, and a scheduler that does not spin while it waits."""


@dataclass(frozen=True)
class Server:
    """A running server; its processes are one process group."""

    url: str
    model_path: Path
    process: subprocess.Popen[bytes]
    log_path: Path


def can_run_sglang() -> bool:
    """Whether this interpreter has SGLang and was started with the shim on its path."""
    return find_spec("sglang") is not None and str(_SHIM) in {str(Path(entry).resolve()) for entry in sys.path}


def shim_environment() -> dict[str, str]:
    """The environment in which stock SGLang can be imported on this machine, by children of the process as well."""
    path = os.pathsep.join(filter(None, [str(_SHIM), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def sglang_server(model_path: Path, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A stock ``sglang.launch_server`` in float32 on the CPU.

    Args:
        model_path: Model directory, such as one of ``tests.support.tiny_models``.
        *flags: Added to ``CPU_FLAGS``; a later flag wins. With ``--tp-size 2`` the ranks talk over gloo.
        env: Added to the environment.
    """
    port = free_port()
    # The driver's process group rendezvous; SGLang derives it from the port, which two servers then may share.
    ports = ["--port", str(port), "--nccl-port", str(free_port())]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path), "--host", "127.0.0.1"]
    ranks = _ranks(flags)
    settings = shim_environment() | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks)),
    }
    with tempfile.TemporaryDirectory(prefix="slime-sglang-", ignore_cleanup_errors=True) as scratch:
        log_path = Path(scratch) / "server.log"
        # Its sockets lie in TMPDIR: they go with the folder, which a killed server leaves behind.
        settings |= {"TMPDIR": scratch, **(env or {})}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, *ports, *CPU_FLAGS, *flags],
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", model_path, process, log_path)
        try:
            _wait(server)
            yield server
        finally:
            end(server)


def end(server: Server) -> None:
    """Kill the server and all of its processes at once; safe to call twice.

    On SIGTERM SGLang waits for up to five seconds and then kills its processes as well.
    """
    left_behind = _shared_memory(server.process.pid)
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(_END_SECONDS)
    for path in left_behind:
        path.unlink(missing_ok=True)


def _ranks(flags: tuple[str, ...]) -> int:
    """Scheduler processes of a server with these flags."""
    given = dict(pairwise(flags))
    return int(given.get("--tp-size", "1")) * int(given.get("--pp-size", "1"))


def _shared_memory(pid: int) -> set[Path]:
    """Files in memory that the processes have open and that outlive them."""
    found: set[Path] = set()
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                found |= {Path(m.path) for m in process.memory_maps() if m.path.startswith(_SHARED_MEMORY)}
    return found


def _wait(server: Server) -> None:
    give_up_at = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up_at:
        code = server.process.poll()
        if code is not None:
            raise AssertionError(f"the server ended with {code}:\n{_end_of(server.log_path)}")
        if _answers(f"{server.url}/ready"):
            return
        time.sleep(0.2)
    raise AssertionError(f"{server.url} was not ready within {START_SECONDS:g} s:\n{_end_of(server.log_path)}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]
