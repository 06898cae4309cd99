"""The HTTP contract of a generation engine: routes, request messages with their checks, reply shapes.

The contract is SGLang's native one, so that a plug-in or a client written for SGLang works on the embedded engine and
the other way round. This module knows names, types and bounds; it opens no socket and runs no model. It is the one
module that other packages import; the messages live in the modules it takes them from.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from slime.engines.checks import RequestError
from slime.engines.control_messages import (
    MEMORY_TAGS,
    AbortMessage,
    BeginUpdateMessage,
    ContinueMessage,
    DestroyGroupMessage,
    EndUpdateMessage,
    GetWeightMessage,
    InitGroupMessage,
    MemoryMessage,
    PauseMessage,
    PauseMode,
    UpdateFromDiskMessage,
    UpdateFromDistributedMessage,
    UpdateFromTensorMessage,
    UpdateVersionMessage,
    WeightsCheckerMessage,
    parse_message,
)
from slime.engines.generation import (
    GenerateItem,
    GenerateRequest,
    SamplingParams,
    parse_generate,
    parse_sampling_params,
)

__all__ = [
    "ABORT_REQUEST",
    "BEGIN_WEIGHT_UPDATE",
    "CONTINUE_GENERATION",
    "DESTROY_WEIGHTS_UPDATE_GROUP",
    "END_WEIGHT_UPDATE",
    "FLUSH_CACHE",
    "GENERATE",
    "GET_WEIGHTS_BY_NAME",
    "HEALTH",
    "HEALTH_GENERATE",
    "INITIAL_WEIGHT_VERSION",
    "INIT_WEIGHTS_UPDATE_GROUP",
    "LOADS",
    "MEMORY_TAGS",
    "MODELS",
    "MODEL_INFO",
    "PAUSE_GENERATION",
    "READY",
    "RELEASE_MEMORY_OCCUPATION",
    "RESUME_MEMORY_OCCUPATION",
    "SERVER_INFO",
    "UPDATE_WEIGHTS_FROM_DISK",
    "UPDATE_WEIGHTS_FROM_DISTRIBUTED",
    "UPDATE_WEIGHTS_FROM_TENSOR",
    "UPDATE_WEIGHT_VERSION",
    "WEIGHTS_CHECKER",
    "AbortMessage",
    "AbortReason",
    "BeginUpdateMessage",
    "ContinueMessage",
    "DestroyGroupMessage",
    "EndUpdateMessage",
    "FinishReason",
    "GenerateItem",
    "GenerateReply",
    "GenerateRequest",
    "GetWeightMessage",
    "InitGroupMessage",
    "LengthReason",
    "LogProbTriple",
    "MemoryMessage",
    "MetaInfo",
    "PauseMessage",
    "PauseMode",
    "RequestError",
    "SamplingParams",
    "StopReason",
    "UpdateFromDiskMessage",
    "UpdateFromDistributedMessage",
    "UpdateFromTensorMessage",
    "UpdateVersionMessage",
    "WeightSpan",
    "WeightsCheckerMessage",
    "parse_generate",
    "parse_message",
    "parse_sampling_params",
]

GENERATE = "/generate"
ABORT_REQUEST = "/abort_request"
PAUSE_GENERATION = "/pause_generation"
CONTINUE_GENERATION = "/continue_generation"
FLUSH_CACHE = "/flush_cache"
RELEASE_MEMORY_OCCUPATION = "/release_memory_occupation"
RESUME_MEMORY_OCCUPATION = "/resume_memory_occupation"
BEGIN_WEIGHT_UPDATE = "/begin_weight_update"
END_WEIGHT_UPDATE = "/end_weight_update"
UPDATE_WEIGHTS_FROM_TENSOR = "/update_weights_from_tensor"
INIT_WEIGHTS_UPDATE_GROUP = "/init_weights_update_group"
DESTROY_WEIGHTS_UPDATE_GROUP = "/destroy_weights_update_group"
UPDATE_WEIGHTS_FROM_DISTRIBUTED = "/update_weights_from_distributed"
UPDATE_WEIGHTS_FROM_DISK = "/update_weights_from_disk"
UPDATE_WEIGHT_VERSION = "/update_weight_version"
WEIGHTS_CHECKER = "/weights_checker"
GET_WEIGHTS_BY_NAME = "/get_weights_by_name"
HEALTH = "/health"
HEALTH_GENERATE = "/health_generate"
READY = "/ready"
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"
LOADS = "/v1/loads"
MODELS = "/v1/models"

INITIAL_WEIGHT_VERSION = "default"


class StopReason(TypedDict):
    """Ended at a stop token (``matched`` is its id) or a stop string."""

    type: Literal["stop"]
    matched: int | str


class LengthReason(TypedDict):
    """Ended at a length limit; ``length`` is the number of output tokens."""

    type: Literal["length"]
    length: int


class AbortReason(TypedDict):
    """Ended by an abort; the reply carries what was generated until then."""

    type: Literal["abort"]
    message: str
    status_code: int | None
    err_type: str | None


FinishReason = StopReason | LengthReason | AbortReason
LogProbTriple = tuple[float | None, int, str | None]
"""Log-prob (None for the first prompt token), token id, token text if asked for."""


class WeightSpan(TypedDict):
    """Output tokens ``[start, end)`` were sampled with the weights of ``version``."""

    version: str
    start: int
    end: int


class MetaInfo(TypedDict):
    """What an engine says about one answer."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    weight_version: str
    weight_versions: list[WeightSpan]
    input_token_logprobs: NotRequired[list[LogProbTriple]]
    output_token_logprobs: NotRequired[list[LogProbTriple]]
    output_token_logprobs_length: NotRequired[int]
    input_top_logprobs: NotRequired[list[list[LogProbTriple] | None]]
    output_top_logprobs: NotRequired[list[list[LogProbTriple]]]
    output_token_sampling_mask: NotRequired[list[list[int]]]
    output_token_sampling_logprobs: NotRequired[list[float | list[float]]]
    output_token_sampling_mask_length: NotRequired[int]
    routed_experts: NotRequired[str]
    top_p_token_ids: NotRequired[str]
    top_p_token_offsets: NotRequired[str]
    e2e_latency: NotRequired[float]


class GenerateReply(TypedDict):
    """Answer of ``/generate`` for one sample; a batch or ``n > 1`` gives a list of these."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
