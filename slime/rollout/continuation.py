"""One output in several parts: what engines aborted for new weights is continued on them.

A weight update with ``--update-weight-pause-mode abort`` ends every running request with what it has. The rollout asks
again, for prompt and output so far, and puts the parts together here: tokens, log-probs, kept tokens, routed experts
and weight versions are each part's own, the finish reason is the last one's. To whoever asked, it is one completion.

Pure: no requests are sent here. Tests hold, for every way to cut an output in two, that the parts give what one
uncut answer of the same tokens gives, and that an output ends where an engine would have ended it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slime.rollout.stops import RECENT_TOKENS, StopConditions
from slime.version_spans import VersionSpan, append_spans, clip_spans, spans_of_reply

MAX_EMPTY_PARTS = 3
"""Aborted answers in a row without a token after which an engine is taken to refuse the request."""

# The state of a grammar cannot be carried into another request: such an output starts again.
_WHOLE_ONLY = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")
_SUMMED = (
    "num_retractions", "e2e_latency", "queue_time", "spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine generated.

    Args:
        token_ids: ``[n]`` ids, the stop token included.
        log_probs: ``[n]`` log-probs of them.
        text: The engine's text.
        meta_info: The rest of the reply, with top-p sets and routed experts in ``Sample``'s form.
    """

    token_ids: list[int]
    log_probs: list[float]
    text: str
    meta_info: Mapping[str, Any]

    @property
    def finish_type(self) -> str:
        """``stop``, ``length`` or ``abort``."""
        return str((self.meta_info.get("finish_reason") or {}).get("type"))

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the last id is the token that ended generation, and not part of the text."""
        reason = self.meta_info.get("finish_reason") or {}
        return bool(self.token_ids) and reason.get("type") == "stop" and reason.get("matched") == self.token_ids[-1]

    @property
    def was_interrupted(self) -> bool:
        """Whether an engine was told to end the request, and did not end it because of a fault of its own."""
        return _is_interruption(self.meta_info.get("finish_reason") or {})

    def cut(self, count: int) -> Completion:
        """The first ``count`` tokens with what belongs to them; the text is left as it is."""
        meta = dict(self.meta_info)
        dropped = len(self.token_ids) - count
        if not dropped:
            return self
        spans = clip_spans(spans_of_reply(meta, len(self.token_ids)), count)
        meta["weight_versions"] = [asdict(span) for span in spans]
        meta["completion_tokens"] = count
        if spans:
            meta["weight_version"] = spans[-1].version
        if meta.get("top_p_token_offsets") is not None:
            meta["top_p_token_offsets"] = meta["top_p_token_offsets"][: count + 1]
            meta["top_p_token_ids"] = meta["top_p_token_ids"][: meta["top_p_token_offsets"][-1]]
        if meta.get("routed_experts") is not None:
            meta["routed_experts"] = meta["routed_experts"][: max(len(meta["routed_experts"]) - dropped, 0)]
        return Completion(self.token_ids[:count], self.log_probs[:count], self.text, meta)


class Draft:
    """An output that grows part by part.

    Args:
        input_ids: ``[n]`` prompt ids.
        params: Sampling parameters of the whole output; ``max_new_tokens`` is given.
        stops: The stop conditions in them.
        routes_from: Leading tokens of the prompt whose routed experts are known already.
    """

    def __init__(
        self, input_ids: Sequence[int], params: Mapping[str, Any], stops: StopConditions, *, routes_from: int
    ) -> None:
        self._prompt_ids = list(input_ids)
        self._params = dict(params)
        self._stops = stops
        self._routes_from = routes_from
        self._parts: list[Completion] = []
        self._finish: Mapping[str, Any] = {}
        self._empty_parts = 0
        self._is_as_answered = True

    @property
    def output_ids(self) -> list[int]:
        """Tokens so far."""
        return [token_id for part in self._parts for token_id in part.token_ids]

    @property
    def is_interrupted(self) -> bool:
        """Whether the output was interrupted, and asking again makes sense."""
        return _is_interruption(self._finish) and self._empty_parts < MAX_EMPTY_PARTS

    @property
    def input_ids(self) -> list[int]:
        """Prompt of the next request."""
        return [*self._prompt_ids, *self.output_ids]

    @property
    def params(self) -> dict[str, Any]:
        """Sampling parameters of the next request: the budget that is left."""
        done = len(self.output_ids)
        params = {**self._params, "max_new_tokens": self._params["max_new_tokens"] - done}
        if params.get("min_new_tokens"):
            params["min_new_tokens"] = max(params["min_new_tokens"] - done, 0)
        return params

    @property
    def routes_from(self) -> int:
        """Leading tokens of the next request whose routed experts are known: all but the last, which was never run."""
        return len(self.input_ids) - 1 if self.output_ids else self._routes_from

    def add(self, part: Completion) -> None:
        """Take the answer to the request that ``input_ids`` and ``params`` describe."""
        if part.was_interrupted and any(self._params.get(name) for name in _WHOLE_ONLY):
            part = part.cut(0)
            self._parts.clear()
        border = len(self.output_ids)
        output_ids = [*self.output_ids, *part.token_ids]
        self._finish = part.meta_info.get("finish_reason") or {}
        stop = self._stops.across(output_ids, border)
        if stop is None and part.was_interrupted:
            stop = self._stops.first(output_ids, max(border, len(output_ids) - RECENT_TOKENS))
        if stop is not None:
            part = part.cut(stop.count - border)
            self._finish = {"type": "stop", "matched": stop.matched}
        elif part.was_interrupted and len(output_ids) >= self._params["max_new_tokens"]:
            self._finish = {"type": "length", "length": len(output_ids)}
        self._is_as_answered = not self._parts and stop is None
        self._empty_parts = 0 if part.token_ids else self._empty_parts + 1
        if part.token_ids or not self._parts:
            self._parts = [p for p in self._parts if p.token_ids] + [part]

    def completion(self) -> Completion:
        """The output as one answer."""
        assert self._parts, "nothing was added"
        if self._is_as_answered:
            part = self._parts[0]
            return replace(part, meta_info={**part.meta_info, "finish_reason": self._finish})
        meta = {**_joined_meta(self._parts), "finish_reason": self._finish}
        log_probs = [p for part in self._parts for p in part.log_probs]
        return Completion(self.output_ids, log_probs, self._text(), meta)

    def _text(self) -> str:
        """Text of the joined ids: that of the parts may break off within a character."""
        ids, matched = self.output_ids, self._finish.get("matched")
        trims = not self._params.get("no_stop_trim")
        if trims and isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        text = self._stops.tokenizer.decode(ids, skip_special_tokens=self._params.get("skip_special_tokens", True))
        return text[: text.rfind(matched)] if trims and isinstance(matched, str) and matched in text else text


def _is_interruption(finish: Mapping[str, Any]) -> bool:
    return finish.get("type") == "abort" and finish.get("status_code") is None


def _joined_meta(parts: Sequence[Completion]) -> dict[str, Any]:
    """The replies of several parts as one: counters of the first or summed, columns one after the other."""
    first, last = parts[0].meta_info, parts[-1].meta_info
    meta = dict(last)
    meta |= {name: first[name] for name in ("prompt_tokens", "cached_tokens") if name in first}
    meta |= {name: sum(part.meta_info.get(name) or 0 for part in parts) for name in _SUMMED if name in last}
    meta["completion_tokens"] = sum(len(part.token_ids) for part in parts)
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        spans = append_spans(spans, spans_of_reply(part.meta_info, len(part.token_ids)), offset)
        offset += len(part.token_ids)
    if spans:
        meta["weight_versions"] = [asdict(span) for span in spans]
    if last.get("top_p_token_offsets") is not None:
        sizes = [np.diff(part.meta_info["top_p_token_offsets"]) for part in parts]
        meta["top_p_token_ids"] = [i for part in parts for i in part.meta_info["top_p_token_ids"]]
        meta["top_p_token_offsets"] = np.cumsum(np.concatenate([[0], *sizes])).tolist()
    if last.get("routed_experts") is not None:
        meta["routed_experts"] = np.concatenate([part.meta_info["routed_experts"] for part in parts])
        meta["routed_experts_start_len"] = first["routed_experts_start_len"]
    return meta
