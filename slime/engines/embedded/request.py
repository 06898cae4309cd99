"""One sample on its way through the engine: what was asked, what came out, why it ended.

A request with ``n > 1`` is n of these with one parent id. The worker thread writes them; the HTTP side reads finished
ones, and of unfinished ones only the prefix of each list that an event names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime.engines.api import AbortReason, FinishReason, GenerateItem, WeightSpan
from slime.engines.embedded.cache import Row
from slime.engines.embedded.kv import KvBlock
from slime.engines.embedded.prefix import TokenArray
from slime.engines.embedded.sampling import KeptSet, SampleRow
from slime.engines.embedded.text import StopScanner

RouteArray = npt.NDArray[np.int32]
TopColumn = list[tuple[list[float], list[int]] | None]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the HTTP side is told: the first ``count`` output tokens are there, or ``error`` ended the request."""

    request: Request
    count: int
    spans: tuple[WeightSpan, ...]
    is_last: bool
    error: Exception | None = None


@dataclass(eq=False, kw_only=True)
class Request:
    """State of one sample.

    Args:
        rid: Its id.
        parent_rid: Id of the request it belongs to; equal to ``rid`` unless ``n > 1``.
        item: What was asked.
        prompt: ``[P]`` token ids.
        seed: Of its draws.
        stop_ids: Token ids that end it.
        scanner: Looks for stop strings; None if there are none.
        notify: Takes its progress, called on the worker thread.
        wants_progress: Whether to tell every token (streaming) or only the end.
    """

    rid: str
    parent_rid: str
    item: GenerateItem
    prompt: TokenArray
    seed: int
    stop_ids: frozenset[int]
    scanner: StopScanner | None
    notify: Callable[[Progress], None]
    wants_progress: bool = False
    created: float = field(default_factory=time.monotonic)
    output_ids: list[int] = field(default_factory=list[int])
    output_log_probs: list[float] = field(default_factory=list[float])
    output_top: TopColumn = field(default_factory=list)
    output_kept: list[KeptSet] = field(default_factory=list[KeptSet])
    routes: list[RouteArray] = field(default_factory=list[RouteArray])
    input_log_probs: list[float | None] | None = None
    input_top: TopColumn = field(default_factory=list)
    cached_tokens: int = 0
    num_retractions: int = 0
    spans: list[WeightSpan] = field(default_factory=list[WeightSpan])
    finish: FinishReason | None = None
    row: Row | None = None
    counts: Tensor | None = None
    seen: Tensor | None = None

    @property
    def sequence(self) -> TokenArray:
        """Prompt and output so far, ``[P + R]``."""
        if not self.output_ids:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.output_ids, dtype=np.int32)])

    @property
    def wants_kept(self) -> bool:
        """Whether the tokens kept by truncation are reported."""
        return self.item.return_sampling_mask or self.item.sampling.returns_mask

    @property
    def remaining(self) -> int:
        """Tokens that may still be drawn."""
        return self.item.sampling.max_new_tokens - len(self.output_ids)

    def sample_row(self, vocab_size: int, device: torch.device) -> SampleRow:
        """Describe the next draw for the sampler."""
        params = self.item.sampling
        if params.penalises and self.counts is None:
            self._count(vocab_size, device)
        position = len(self.output_ids)
        return SampleRow(
            params=params,
            seed=self.seed,
            position=position,
            banned=sorted(self.stop_ids) if position < params.min_new_tokens else (),
            counts=self.counts,
            seen=self.seen,
            top=self.item.top_logprobs_num if self.item.return_logprob else 0,
            wants_kept=self.wants_kept,
        )

    def append(
        self,
        token: int,
        log_prob: float,
        version: str,
        top: tuple[list[float], list[int]] | None,
        kept: KeptSet | None,
    ) -> None:
        """Take one drawn token and decide whether the output ends with it."""
        self.output_ids.append(token)
        self.output_log_probs.append(log_prob)
        if top is not None:
            self.output_top.append(top)
        if kept is not None:
            self.output_kept.append(kept)
        if self.counts is not None and self.seen is not None:
            self.counts[token] += 1
            self.seen[token] = True
        self._extend_span(version)
        self.finish = self._finish_reason(token)

    def record_routes(self, kv: KvBlock, *, start: int = 0) -> None:
        """Remember the experts of tokens from ``start`` on, which ``kv`` holds, before it is freed.

        A token keeps the experts of the pass that its successor was drawn from: what a retraction computes again is
        not recorded again. The last token was never run.
        """
        if not self.item.return_routed_experts or kv.routes is None:
            return
        known = sum(len(part) for part in self.routes)
        fresh = kv.routes[known - start : len(self.prompt) + len(self.output_ids) - 1 - start]
        if len(fresh):
            self.routes.append(fresh.to("cpu", torch.int32, copy=True).numpy())

    def note_cached(self, tokens: int) -> None:
        """Remember how much of the prompt was found in the cache; what a retraction computes again does not count."""
        if not self.num_retractions and not self.output_ids:
            self.cached_tokens = tokens

    def abort(self, message: str, *, status_code: int | None = None) -> None:
        """End with what there is; a status code says that it is a fault, and not what someone asked for."""
        self.finish = AbortReason(type="abort", message=message, status_code=status_code, err_type=None)

    def progress(self, error: Exception | None = None) -> None:
        """Tell the HTTP side how far this is."""
        spans = tuple(WeightSpan(**span) for span in self.spans)
        is_last = self.finish is not None or error is not None
        self.notify(Progress(self, len(self.output_ids), spans, is_last, error))

    def _finish_reason(self, token: int) -> FinishReason | None:
        count, params = len(self.output_ids), self.item.sampling
        stop_text = self.scanner.push(token) if self.scanner is not None else None
        if count >= params.min_new_tokens:
            if token in self.stop_ids:
                return {"type": "stop", "matched": token}
            if stop_text is not None:
                return {"type": "stop", "matched": stop_text}
        if count >= params.max_new_tokens:
            return {"type": "length", "length": count}
        return None

    def _extend_span(self, version: str) -> None:
        count = len(self.output_ids)
        if self.spans and self.spans[-1]["version"] == version:
            self.spans[-1]["end"] = count
        else:
            self.spans.append(WeightSpan(version=version, start=count - 1, end=count))

    def _count(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(vocab_size, device=device)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.seen[torch.from_numpy(self.sequence.astype(np.int64)).to(device)] = True
        for token in self.output_ids:
            self.counts[token] += 1
