"""What a ``/generate`` request may say: sampling parameters, prompts, and their checks.

Every parser returns a checked value or raises ``RequestError`` naming the field, what was found and what is accepted:
nothing is ignored silently. Tests hold: the defaults are SGLang's, and an unknown field is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from slime.engines.checks import RequestError, as_object, checked, list_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose the next tokens of one request; defaults and names are SGLang's.

    ``temperature`` 0 is greedy. ``top_k`` -1 and ``top_p`` 1 and ``min_p`` 0 keep every token. Log-probs that an
    engine reports are those of the model at this temperature (at 1 when greedy), before penalties and truncation;
    those of the distribution that was drawn from come with ``return_sampling_mask``.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    custom_params: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        checks: list[tuple[str, bool, str]] = [
            ("max_new_tokens", self.max_new_tokens >= 0, "an integer >= 0"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "an integer in [0, max_new_tokens]"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "a finite number >= 0 (0 is greedy)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (all tokens) or an integer >= 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number in [0, 1]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "a number in [-2, 2]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "a number in [-2, 2]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 2.0, "a number in (0, 2]"),
            ("n", self.n >= 1, "an integer >= 1"),
            ("stop", all(self.stop), "a string or a list of strings, none of them empty"),
        ]
        for name, valid, accepted in checks:
            if not valid:
                raise RequestError(f"sampling_params.{name} is {getattr(self, name)!r}; accepted: {accepted}")
        for key in self.custom_params or {}:
            if key != "return_top_p_token_ids":
                raise RequestError(f"unknown field `custom_params.{key}`, expected one of return_top_p_token_ids")

    @property
    def truncates(self) -> bool:
        """Whether ``top_k``, ``top_p`` or ``min_p`` can remove a token."""
        return self.top_k != -1 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalises(self) -> bool:
        """Whether tokens that occurred before become more or less likely."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def returns_mask(self) -> bool:
        """Whether the kept token ids are asked for through ``custom_params``."""
        return bool((self.custom_params or {}).get("return_top_p_token_ids"))


_UNSUPPORTED_SAMPLING = {
    "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "stream_interval", "beam_width",
}  # fmt: skip
"""Known to SGLang; refused here unless they are null."""


def parse_sampling_params(body: Mapping[str, Any] | None) -> SamplingParams:
    """Check and complete ``sampling_params``.

    Raises:
        RequestError: An unknown key, a wrong type or a value out of range.
    """
    values: dict[str, Any] = {}
    known = {f.name for f in fields(SamplingParams)}
    for key, value in (body or {}).items():
        if key in _UNSUPPORTED_SAMPLING:
            if value is not None:
                raise RequestError(f"sampling_params.{key} is not supported by the embedded engine; leave it out")
        elif key not in known:
            raise RequestError(f"unknown field `sampling_params.{key}`, expected one of {', '.join(sorted(known))}")
        elif value is not None:
            values[key] = _sampling_value(key, value)
    return SamplingParams(**values)


def _sampling_value(key: str, value: Any) -> Any:
    where = f"sampling_params.{key}"
    if key in ("stop", "stop_regex"):
        return (value,) if isinstance(value, str) else tuple(list_of(value, str, where))
    if key == "stop_token_ids":
        return tuple(list_of([value] if isinstance(value, int) else value, int, where))
    if key == "custom_params":
        return checked(value, dict, where)
    return checked(value, _SAMPLING_TYPES[key], where)


_SAMPLING_TYPES: dict[str, type[Any]] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), float),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), bool),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateItem:
    """One prompt of a ``/generate`` request; exactly one of ``text`` and ``input_ids`` is set."""

    rid: str | None
    text: str | None
    input_ids: tuple[int, ...] | None
    sampling: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    return_sampling_mask: bool = False
    sampling_logprobs_mode: str = "selected"
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """A checked ``/generate`` body; ``is_batch`` decides whether the answer is a list."""

    items: tuple[GenerateItem, ...]
    is_batch: bool
    stream: bool = False


_ITEM_TYPES: dict[str, type] = {
    "return_logprob": bool, "logprob_start_len": int, "top_logprobs_num": int,
}  # fmt: skip
_SHARED_TYPES: dict[str, type] = {
    "return_text_in_logprobs": bool, "return_sampling_mask": bool, "sampling_logprobs_mode": str,
    "return_routed_experts": bool, "routed_experts_start_len": int, "stream": bool,
}  # fmt: skip
_WITHOUT_EFFECT = {
    "model", "no_logs", "log_metrics", "custom_labels", "conversation_id", "routing_key", "session_id", "priority",
    "data_parallel_rank", "routed_dp_rank", "background",
}  # fmt: skip
"""Logging and routing fields that the router adds or passes on; they cannot change the answer of one engine."""
_UNSUPPORTED = {
    "input_embeds", "image_data", "video_data", "audio_data", "modalities", "lora_path", "lora_id", "session_params",
    "token_ids_logprob", "return_hidden_states", "return_entropy", "return_prompt_token_ids", "extra_key", "cache_salt",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor", "return_bytes",
}  # fmt: skip


def parse_generate(body: Any) -> GenerateRequest:
    """Check a ``/generate`` body and split a batch into its items.

    Raises:
        RequestError: A field is unknown, unsupported, of the wrong type, or does not fit the batch size.
    """
    data = as_object(body)
    known = {"rid", "text", "input_ids", "sampling_params", *_ITEM_TYPES, *_SHARED_TYPES}
    for key, value in data.items():
        if key in _UNSUPPORTED and value not in (None, False, 0, [], {}):
            raise RequestError(f"`{key}` is not supported by the embedded engine; leave it out (found {value!r})")
        if key not in known | _UNSUPPORTED | _WITHOUT_EFFECT:
            raise RequestError(f"unknown field `{key}`, expected one of {', '.join(sorted(known))}")
    data = {k: v for k, v in data.items() if v is not None}
    texts, ids, is_batch = _prompts(data)
    size = len(texts)
    shared = {k: checked(data[k], t, k) for k, t in _SHARED_TYPES.items() if k in data}
    stream = bool(shared.pop("stream", False))
    columns = {k: _column(data[k], t, size, k) for k, t in _ITEM_TYPES.items() if k in data}
    sampling = _sampling_column(data.get("sampling_params"), size)
    rids = _rids(data.get("rid"), size, is_batch)
    items = tuple(
        GenerateItem(
            rid=rids[i],
            text=texts[i],
            input_ids=ids[i],
            sampling=sampling[i],
            **{k: column[i] for k, column in columns.items()},
            **shared,
        )
        for i in range(size)
    )
    for item in items:
        _check_item(item)
    return GenerateRequest(items=items, is_batch=is_batch, stream=stream)


def _check_item(item: GenerateItem) -> None:
    sampling = item.sampling
    if item.return_sampling_mask and not (sampling.truncates or sampling.temperature == 0.0):
        raise RequestError("return_sampling_mask needs top_p < 1, top_k or min_p; all tokens are kept otherwise")
    if item.sampling_logprobs_mode not in ("selected", "support"):
        raise RequestError(f"sampling_logprobs_mode is {item.sampling_logprobs_mode!r}; accepted: selected, support")
    if item.sampling_logprobs_mode != "selected" and not item.return_sampling_mask:
        raise RequestError("sampling_logprobs_mode needs return_sampling_mask")
    if item.routed_experts_start_len < 0:
        raise RequestError(
            f"routed_experts_start_len is {item.routed_experts_start_len}; accepted: an integer >= 0, at most the "
            "number of prompt tokens"
        )
    if item.logprob_start_len < -1:
        raise RequestError(f"logprob_start_len is {item.logprob_start_len}; accepted: -1 or an integer >= 0")
    if not 0 <= item.top_logprobs_num <= 1024:
        raise RequestError(f"top_logprobs_num is {item.top_logprobs_num}; accepted: an integer in [0, 1024]")


def _prompts(data: Mapping[str, Any]) -> tuple[list[str | None], list[tuple[int, ...] | None], bool]:
    if ("text" in data) == ("input_ids" in data):
        found = "both" if "text" in data else "neither"
        raise RequestError(f"exactly one of `text` and `input_ids` is required; found {found}")
    if "text" in data:
        is_batch = isinstance(data["text"], list)
        texts = list_of(data["text"] if is_batch else [data["text"]], str, "text")
        if not texts:
            raise RequestError("text is an empty list; accepted: at least one prompt")
        return list(texts), [None] * len(texts), is_batch
    rows = data["input_ids"]
    if not isinstance(rows, list) or not rows:
        raise RequestError("input_ids is empty or no list; accepted: a list of token ids or a list of such lists")
    is_batch = isinstance(rows[0], list)
    lists = [list_of(row, int, "input_ids") for row in cast("list[Any]", rows if is_batch else [rows])]
    if any(not row for row in lists):
        raise RequestError("input_ids has an empty prompt; accepted: at least one token per prompt")
    return [None] * len(lists), [tuple(row) for row in lists], is_batch


def _column(value: Any, kind: type, size: int, where: str) -> list[Any]:
    if not isinstance(value, list):
        return [checked(value, kind, where)] * size
    column = list_of(value, kind, where)
    if len(column) != size:
        raise RequestError(f"{where} has {len(column)} entries for {size} prompts; accepted: one value or {size}")
    return column


def _sampling_column(value: Any, size: int) -> list[SamplingParams]:
    if isinstance(value, list):
        rows = list_of(value, dict, "sampling_params")
        if len(rows) != size:
            raise RequestError(f"sampling_params has {len(rows)} entries for {size} prompts; accepted: one or {size}")
        return [parse_sampling_params(row) for row in rows]
    return [parse_sampling_params(None if value is None else checked(value, dict, "sampling_params"))] * size


def _rids(value: Any, size: int, is_batch: bool) -> list[str | None]:
    if value is None:
        return [None] * size
    if isinstance(value, str):
        return [f"{value}_{i}" for i in range(size)] if is_batch else [value]
    rids = _column(value, str, size, "rid")
    if len(set(rids)) != size:
        raise RequestError("rid has duplicates; accepted: a different rid for each prompt of the batch")
    return list(rids)
