"""Bodies of the control endpoints and their strict parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from slime.engines.checks import RequestError, as_object, checked, list_of

MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortMessage:
    """``/abort_request``; an unknown ``rid`` is no error."""

    rid: str = ""
    abort_all: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseMessage:
    """``/pause_generation``: end, put back, or freeze what is running."""

    mode: PauseMode = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinueMessage:
    """``/continue_generation``."""

    torch_empty_cache: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMessage:
    """``/release_memory_occupation`` and ``/resume_memory_occupation``; None means every tag."""

    tags: list[str] | None = None

    def __post_init__(self) -> None:
        for tag in self.tags or []:
            if tag not in MEMORY_TAGS:
                raise RequestError(f"tags has {tag!r}; accepted: {', '.join(MEMORY_TAGS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginUpdateMessage:
    """``/begin_weight_update``."""

    selector: Literal["all", "target"] = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndUpdateMessage:
    """``/end_weight_update``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateFromTensorMessage:
    """``/update_weights_from_tensor``: shared-memory handles, one base64 string per tensor-parallel rank."""

    serialized_named_tensors: list[str] = field(default_factory=list[str])
    load_format: Literal["direct", "flattened_bucket"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Literal["all", "target"] = "all"
    torch_empty_cache: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class InitGroupMessage:
    """``/init_weights_update_group``: join the trainer's process group as rank ``rank_offset``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"


@dataclass(frozen=True, kw_only=True, slots=True)
class DestroyGroupMessage:
    """``/destroy_weights_update_group``."""

    group_name: str = "weight_update_group"


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateFromDistributedMessage:
    """``/update_weights_from_distributed``: the trainer broadcasts from rank 0, in this order.

    Each tensor alone, or with ``flattened_bucket`` their bytes in one, without gaps.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None
    selector: Literal["all", "target"] = "all"
    torch_empty_cache: bool = False

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            counts = f"{len(self.names)}, {len(self.dtypes)} and {len(self.shapes)}"
            raise RequestError(f"names, dtypes and shapes have {counts} entries; accepted: equal numbers")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateFromDiskMessage:
    """``/update_weights_from_disk``: a model directory that the engine can read."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: Literal[False] = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateVersionMessage:
    """``/update_weight_version``: rename the present weights."""

    new_version: str
    abort_all_requests: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsCheckerMessage:
    """``/weights_checker``; names that contain one of ``skip_tensor_list`` are left out."""

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    skip_tensor_list: list[str] | None = None
    allow_quant_error: bool = False
    selector: Literal["target", "draft", "all"] = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class GetWeightMessage:
    """``/get_weights_by_name``."""

    name: str
    truncate_size: int = 100


Message = TypeVar("Message")


def parse_message(kind: type[Message], body: Any) -> Message:
    """Check the JSON body of a control request against the dataclass ``kind``.

    Raises:
        RequestError: A field is missing, unknown or has a value that is not accepted.
    """
    data = as_object(body)
    hints = get_type_hints(kind)
    for key in data:
        if key not in hints:
            raise RequestError(f"unknown field `{key}`, expected one of {', '.join(sorted(hints)) or '(none)'}")
    values = {key: _message_value(value, hints[key], key) for key, value in data.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise RequestError(f"the body lacks a field: {error}; it has {', '.join(sorted(data)) or 'none'}") from error


def _message_value(value: Any, hint: Any, where: str) -> Any:
    options = _flat_options(hint)
    if value is None and type(None) in options:
        return None
    literals = [o for o in options if not isinstance(o, type) and not get_args(o)]
    if literals:
        if value not in literals:
            accepted = ", ".join(str(o) for o in literals) + (" or null" if type(None) in options else "")
            raise RequestError(f"{where} is {value!r}; accepted: {accepted}")
        return value
    kind: Any = next((o for o in options if o is not type(None)), None)
    if kind is None:
        raise RequestError(f"{where} is {value!r}; accepted: null")
    inner = get_args(kind)
    if not inner:
        return checked(value, kind, where)
    if get_args(inner[0]):
        return [list_of(row, int, where) for row in list_of(value, list, where)]
    return list_of(value, inner[0], where)


def _flat_options(hint: Any) -> Sequence[Any]:
    """Members of a union with the values of its literals unfolded; a plain type is its own only member."""
    if hint is None:
        return (type(None),)
    origin_name = getattr(hint, "__origin__", None)
    if origin_name is Literal:
        return get_args(hint)
    if isinstance(hint, type) or origin_name is list:
        return (hint,)
    return [option for member in get_args(hint) for option in _flat_options(member)]
