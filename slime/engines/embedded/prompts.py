"""Prompts on their way into the cache: computed in chunks, once for all requests that wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slime.engines.embedded.attention import PromptChunk
from slime.engines.embedded.prefix import PrefixEntry
from slime.engines.embedded.request import Request, TopColumn
from slime.engines.embedded.sampling import log_softmax


@dataclass(eq=False)
class PromptJob:
    """A prompt being computed and the requests that wait for it.

    ``score_from`` is the first position whose log-prob is asked for, None for none; ``scores`` and ``tops`` fill up
    chunk by chunk.
    """

    entry: PrefixEntry
    requests: list[Request]
    score_from: int | None = None
    scores: list[float | None] = field(default_factory=list[float | None])
    tops: TopColumn = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether every token is computed."""
        return self.entry.filled == len(self.entry.tokens)

    def next_chunk(self, limit: int) -> PromptChunk:
        """The next tokens to compute, at most ``limit``."""
        start = self.entry.filled
        return PromptChunk(self.entry, start, min(len(self.entry.tokens), start + limit))

    def wanted(self, chunk: PromptChunk) -> range:
        """Positions of ``chunk`` whose logits are needed: the last of the prompt, and those that score a token."""
        last = len(self.entry.tokens) - 1
        first = last if self.score_from is None else min(max(self.score_from - 1, 0), last)
        return range(max(first, chunk.start), chunk.end)

    def take(self, chunk: PromptChunk, logits: Tensor) -> None:
        """Account for a computed chunk; ``logits`` ``[n, V]`` belong to its last n tokens."""
        if self.score_from is not None:
            self._score(chunk, logits)
        self.entry.filled = chunk.end
        if self.is_done:
            self.entry.logits = logits[-1].clone()
            for request in self.requests:
                if self.score_from is not None:
                    request.input_log_probs, request.input_top = list(self.scores), list(self.tops)

    def _score(self, chunk: PromptChunk, logits: Tensor) -> None:
        """Log-probs of prompt tokens: the logits at a position score the next token."""
        top = self.requests[0].item.top_logprobs_num
        if chunk.start == 0 and self.score_from == 0:
            self.scores.append(None)
            self.tops.append(None)
        temperature = self.requests[0].item.sampling.temperature or 1.0
        first = chunk.end - logits.shape[0]
        targets = self.entry.tokens[first + 1 : chunk.end + 1].astype(np.int64)
        log_probs = log_softmax(logits[: len(targets)].float() / temperature)
        index = torch.from_numpy(targets).to(logits.device)
        self.scores.extend(log_probs.gather(1, index[:, None])[:, 0].tolist())
        if top and len(targets):
            values, ids = torch.topk(log_probs, min(top, log_probs.shape[1]), dim=-1)
            self.tops.extend(zip(values.tolist(), ids.tolist(), strict=True))
