"""Weight updates of one training rank, for tests that need no trainer around them."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from slime.weights.bracket import release
from slime.weights.control import EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.streamed import StreamedUpdater, StreamSettings
from slime.weights.verify import WeightVerifier


def endpoints_of(urls: Sequence[str], **fields: Any) -> list[EngineEndpoint]:
    """Endpoints of embedded engines."""
    values = {"backend": "embedded"} | fields
    return [EngineEndpoint(url=url, name=f"engine {i}", **values) for i, url in enumerate(urls)]


@contextmanager
def updater_of(
    urls: Sequence[str],
    *,
    carrier: str = "tensor",
    timeout_seconds: float = 60.0,
    bucket_bytes: int = 10**9,
    model: Path | None = None,
    **fields: Any,
) -> Generator[StreamedUpdater]:
    """The updater of a trainer of one rank, connected to engines; with ``model`` it verifies."""

    def verifier(calls: EngineCalls) -> WeightVerifier:
        assert model is not None
        return WeightVerifier(calls, model=json.loads((model / "config.json").read_text()), share=None)

    settings = StreamSettings(
        is_cuda=False,
        shares_memory=carrier == "tensor",
        timeout_seconds=timeout_seconds,
        bucket_bytes=bucket_bytes,
        pause_mode=lambda endpoints: "retract",
        verifier=verifier if model is not None else None,
    )
    updater = StreamedUpdater(settings, rank=0, world_size=1)
    try:
        updater.connect(endpoints_of(urls, **fields))
        yield updater
    finally:
        updater.close()


def let_go(urls: Sequence[str]) -> None:
    """What the driver does after an update that failed for good."""
    release(endpoints_of(urls), has_session=True, timeout_seconds=5.0)


def shared_memory_files() -> set[str]:
    """Names of torch's shared memory, ``torch_{pid}_...``, that no other living process than this one made."""
    names = {path.name for path in Path("/dev/shm").glob("torch_*")}
    pids = {name: int(name.split("_")[1]) for name in names}
    return {name for name, pid in pids.items() if pid == os.getpid() or not Path(f"/proc/{pid}").exists()}


def as_bucket(weights: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Weights as the one bucket of an update."""
    return list(weights.items())


def listening_process(url: str) -> int:
    """Process id of the server at ``url``, which is on this machine."""
    port = str(urlsplit(url).port).encode()
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"--port" in words and words[words.index(b"--port") + 1] == port:
                return int(folder.name)
    raise AssertionError(f"no process listens at {url}")
