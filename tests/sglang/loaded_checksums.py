"""What SGLang's own checker says of models that SGLang's own loader has loaded, without a server around them.

A script: ``loaded_checksums.py OUT MODEL TP ...`` writes for every model a list, one entry per process, of checksums by
name. Importing SGLang takes most of a server's start; here it is done once, and every process is forked from it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from sglang.benchmark import one_batch
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.server_args import PortArgs, prepare_server_args

from tests.sglang.servers import CPU_FLAGS


def checksums(rank: int, ports: Any, arguments: Any) -> dict[str, str]:
    """Load a model as process ``rank`` and sum up what it holds."""
    world_rank = one_batch.spawn_world_rank(arguments, tp_rank=rank, pp_rank=0)
    one_batch.publish(arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=world_rank, gpu_id=rank))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(arguments, ports, rank, rank)
    return runner.torch_runner.check_weights(action="checksum", role="target")["checksums"]


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
                out.write_text(json.dumps(checksums(rank, ports, arguments)))
                os._exit(0)
            except Exception:  # noqa: BLE001 a fork must not come back
                traceback.print_exc()
                os._exit(1)
        children.append((child, out))
    for child, _ in children:
        os.waitpid(child, 0)
    return [json.loads(out.read_text()) if out.exists() else {} for _, out in children]  # the log says why one is not


if __name__ == "__main__":
    target, *rest = sys.argv[1:]
    models = zip(rest[::2], rest[1::2], strict=True)
    Path(target).write_text(json.dumps([in_processes(Path(path), int(tp_size)) for path, tp_size in models]))
