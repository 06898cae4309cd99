"""Real engine and router processes for tests: started on free ports, waited for, and ended whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.support.gloo import free_port

START_SECONDS = 90.0


@contextmanager
def engine_process(model_path: Path, *flags: str) -> Iterator[str]:
    """A ``slime.engines.server`` on the CPU in float32; yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "slime.engines.server", "--model-path", str(model_path), "--port", str(port)]
    with _process([*command, "--host", "127.0.0.1", "--dtype", "float32", "--device", "cpu", *flags], port, "/ready"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def router_process(worker_urls: Sequence[str], policy: str = "round_robin") -> Iterator[str]:
    """A real ``sglang_router`` in front of ``worker_urls``, which may be none yet; yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    metrics = ["--prometheus-port", str(free_port())]
    workers = ["--worker-urls", *worker_urls] if worker_urls else []
    ready = "/readiness" if worker_urls else "/liveness"
    with _process([*command, "--policy", policy, *metrics, *workers], port, ready):
        url = f"http://127.0.0.1:{port}"
        _wait_for_workers(url, len(worker_urls))
        yield url


def _wait_for_workers(router_url: str, count: int) -> None:
    """The router calls itself ready with its first worker; until the others are in, that one gets everything."""
    give_up_at = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up_at:
        with urllib.request.urlopen(f"{router_url}/workers", timeout=5) as response:
            workers = json.load(response)["workers"]
        if sum(worker["is_healthy"] for worker in workers) == count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{router_url} did not accept {count} workers within {START_SECONDS:g} s")


@contextmanager
def _process(command: list[str], port: int, ready: str) -> Iterator[None]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # A file, not a pipe: a pipe that nobody reads stops the process when it is full.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"http://127.0.0.1:{port}{ready}", output)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _wait(process: subprocess.Popen[bytes], url: str, output: IO[str]) -> None:
    give_up_at = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            output.seek(0)
            raise AssertionError(f"{process.args} ended with {process.returncode}:\n{output.read()}")
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"{url} was not ready within {START_SECONDS:g} s")
