"""Prompts on their way into the cache: computed in chunks, once for all requests that wait for them.

Requests join the computation of an equal prompt only while the weights are those it began with: one that runs on
through a weight change ends with tokens of both, which serve the requests that waited for it and nobody after.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slime.engines.embedded.attention import PromptChunk
from slime.engines.embedded.memory import KvMemory
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


class PromptJobs:
    """The prompts in progress.

    Args:
        memory: Where prompts are found and kept.
    """

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._jobs: dict[tuple[object, ...], PromptJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def requests(self) -> list[Request]:
        """Requests that wait for a prompt."""
        return [request for job in self._jobs.values() for request in job.requests]

    def attach(self, request: Request) -> PrefixEntry | None:
        """Join the computation of the request's prompt, find it in the cache, or start it.

        Returns:
            The prompt, in use by the request, if it is known with its logits.

        Raises:
            KvFullError: No memory to start it.
        """
        cache, sequence, item = self._memory.prompts, request.sequence, request.item
        scores = item.return_logprob and item.logprob_start_len >= 0
        score_from = item.logprob_start_len if scores and request.input_log_probs is None else None
        detail = () if score_from is None else (score_from, item.sampling.temperature, item.top_logprobs_num)
        key = (cache.generation, sequence.tobytes(), *detail)
        job = self._jobs.get(key)
        if job is not None:
            job.entry.users += 1
            job.requests.append(request)
            request.note_cached(len(sequence) - 1)
            return None
        matched, found = cache.find(sequence)
        if score_from is not None:
            matched = min(matched, max(score_from - 1, 0))
        elif found is not None and matched == len(sequence) == len(found.tokens) and found.logits is not None:
            found.users += 1
            # The contract counts the last prompt token as computed, as an engine without kept logits does.
            request.note_cached(matched - 1)
            return found
        matched = min(matched, len(sequence) - 1)
        entry = self._memory.start(sequence, matched, found)
        request.note_cached(matched)
        self._jobs[key] = PromptJob(entry, [request], score_from)
        return None

    def next_chunks(self, max_tokens: int) -> list[tuple[PromptJob, PromptChunk]]:
        """What to compute in the next step, oldest prompts first."""
        left = max_tokens
        chunks: list[tuple[PromptJob, PromptChunk]] = []
        for job in self._jobs.values():
            if left <= 0:
                break
            chunk = job.next_chunk(left)
            chunks.append((job, chunk))
            left -= chunk.end - chunk.start
        return chunks

    def finish(self, job: PromptJob) -> None:
        """Make a computed prompt findable; its requests hold it from now on."""
        self._memory.prompts.insert(job.entry)
        del self._jobs[next(key for key, value in self._jobs.items() if value is job)]

    def remove(self, request: Request) -> bool:
        """Take a request out of the prompt it waits for, which ends with its last one; False if it waits for none."""
        for key, job in self._jobs.items():
            if request in job.requests:
                job.requests.remove(request)
                self._memory.prompts.release(job.entry)
                if not job.requests:
                    del self._jobs[key]
                return True
        return False
