"""An engine, as those see it who bring weights to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slime.weights.pull_request import HostPull


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """One engine that gets the weights of a trainer.

    Args:
        url: Base address, without a slash at the end.
        name: What it is called in messages.
        backend: Which engine answers there.
        num_gpus: GPUs (on a CPU: processes) of the engine: tensor- times pipeline-parallel size.
        node_id: Node of its first process, as Ray names it; None for an engine that runs elsewhere.
        gpu_ids: Its GPUs, by number on their nodes; empty on a CPU and for an engine that runs elsewhere.
        trainer_ranks: Training ranks on the same slots, in the order of the engine's own; empty if it shares none.
        model_path: Model directory that it was started with; None if that is not known.
        local_dir: Directory on its host where it keeps a checkpoint of its own.
        pull: Brings that directory up to a published version; None where no process of the run is on its host.
    """

    url: str
    name: str
    backend: Literal["embedded", "sglang"]
    num_gpus: int = 1
    node_id: str | None = None
    gpu_ids: tuple[int, ...] = ()
    trainer_ranks: tuple[int, ...] = ()
    model_path: str | None = None
    local_dir: str | None = None
    pull: HostPull | None = field(default=None, compare=False, repr=False)
