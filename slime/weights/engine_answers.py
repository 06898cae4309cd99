"""What engines state about themselves and answer to ``/weights_checker``, over versions and kinds of engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from slime.errors import EngineError
from slime.weights.endpoint import EngineEndpoint
from slime.weights.engine_names import EngineLayout, known_layout
from slime.weights.precision import stated_dtype

_SHARED_EXPERT = re.compile(r"\.shared_experts?\.")


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What the expected checksums depend on; engines that agree in it share them.

    Args:
        layout: How it divides and fuses tensors; None for an engine that keeps the Hugging Face ones.
        is_cuda: Whether it computes on CUDA.
        dtype: Of its model; None if it does not say.
    """

    layout: EngineLayout | None
    is_cuda: bool
    dtype: torch.dtype | None

    @property
    def num_processes(self) -> int:
        """Processes with weights of their own."""
        return 1 if self.layout is None else self.layout.tp_size


def kind_of(endpoint: EngineEndpoint, info: Mapping[str, Any], model: Mapping[str, Any]) -> EngineKind | str:
    """The kind of an engine, or why its tensors cannot be compared.

    Args:
        endpoint: The engine.
        info: Its ``/server_info``.
        model: ``config.json`` of the model.
    """
    is_cuda = str(info.get("device")).startswith("cuda")
    dtype = stated_dtype(info.get("dtype"))
    if endpoint.backend == "embedded":
        return EngineKind(None, is_cuda, dtype)
    if dtype is None:  # "auto": that of the checkpoint, but half precision for one in float32
        stated = stated_dtype(model.get("dtype") or model.get("torch_dtype")) or torch.float32
        dtype = torch.float16 if stated is torch.float32 else stated
    layout = known_layout(info, model)
    return layout if isinstance(layout, str) else EngineKind(layout, is_cuda, dtype)


def ranks_of(endpoint: EngineEndpoint, reply: Any) -> list[tuple[int, Mapping[str, str]]]:
    """(tensor-parallel rank, checksum by name) of every process that an answer speaks of.

    Raises:
        EngineError: The answer is none.
    """
    try:
        ranks = cast("list[dict[str, Any]]", reply["ranks"])
        return [(_tp_rank(rank), cast("dict[str, str]", rank["checksums"])) for rank in ranks]
    except (KeyError, TypeError, IndexError) as error:
        text = f"{endpoint.name} at {endpoint.url} answered the question for checksums with {reply!r:.200}"
        raise EngineError(text) from error


def not_comparable(expected: Mapping[str, str], held: Mapping[str, str]) -> dict[str, str]:
    """Expected tensors that an engine holds otherwise than the table says, and why they cannot be compared."""
    missing = {name: "the engine does not list it" for name in expected if name not in held}
    for name in tuple(missing):
        shared = _SHARED_EXPERT.search(name)
        if shared is not None:  # run as one more of the routed experts
            prefix = name[: shared.start()]
            for stacked in (f"{prefix}.experts.w13_weight", f"{prefix}.experts.w2_weight"):
                missing[stacked] = "the engine holds the shared expert in it"
    return missing


def _tp_rank(rank: Mapping[str, Any]) -> int:
    """The rank that one process states: an object, or one for each of its models; the embedded engine states none."""
    stated: Any = rank.get("parallelism_info")
    models = cast("list[Any]", stated if isinstance(stated, list) else [stated])
    return int(models[0]["tp_rank"]) if models[0] else 0
