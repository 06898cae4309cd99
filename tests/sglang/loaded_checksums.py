"""What SGLang's own checker says of models that SGLang's own loader has loaded, without a server around them.

A script: ``loaded_checksums.py OUT MODEL TP ...`` writes for every model a list, one entry per process, of checksums by
name. Importing SGLang takes most of a server's start; here it is done once, and every process is forked from it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from sglang.benchmark.one_batch import load_model
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.server_args import PortArgs, prepare_server_args

from tests.sglang.servers import CPU_FLAGS


def checksums(model: Path, tp_size: int, rank: int, ports: Any, arguments: Any) -> dict[str, str]:
    """Load a model as process ``rank`` of ``tp_size`` and sum up what it holds."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    runner, _ = load_model(arguments, ports, rank, rank)
    return runner.model_runner.check_weights(action="checksum", role="target")["checksums"]


def in_processes(model: Path, tp_size: int) -> list[dict[str, str]]:
    """The checksums of all processes of one model."""
    arguments = prepare_server_args(["--model-path", str(model), "--tp-size", str(tp_size), *CPU_FLAGS])
    arguments.resolve_once()
    _set_envs_and_config(arguments)
    ports = PortArgs.init_new(arguments)
    children: list[tuple[int, Path]] = []
    for rank in range(tp_size):
        out = model / f"held_{rank}.json"
        child = os.fork()
        if child == 0:
            try:
                out.write_text(json.dumps(checksums(model, tp_size, rank, ports, arguments)))
                os._exit(0)
            finally:
                os._exit(1)
        children.append((child, out))
    for child, _ in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{model}: a process ended with {status}"
    return [json.loads(out.read_text()) for _, out in children]


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    models = zip(rest[::2], rest[1::2], strict=True)
    Path(out).write_text(json.dumps([in_processes(Path(path), int(tp_size)) for path, tp_size in models]))
