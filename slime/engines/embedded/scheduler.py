"""Continuous batching: which prompts to compute, which rows to extend, what to do when memory ends.

A step computes some prompt tokens and extends every live row by one token, in one forward pass. Requests with the same
prompt share its computation, wherever they come from: those that arrive while it is computed wait for it, later ones
find it in the prefix cache. Long prompts with several live requests are kept once for all of them; short ones are
copied to each row, which is cheaper. Rows leave as soon as they end.

Runs on one thread; nothing here waits. Tests hold: results do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slime.engines.api import INITIAL_WEIGHT_VERSION
from slime.engines.embedded.attention import DecodeAttention, PromptAttention, PromptChunk
from slime.engines.embedded.cache import Row
from slime.engines.embedded.memory import KvMemory
from slime.engines.embedded.model import Decoder
from slime.engines.embedded.prefix import PrefixEntry
from slime.engines.embedded.prompts import PromptJob, PromptJobs
from slime.engines.embedded.request import Request
from slime.engines.embedded.sampling import sample

_RESERVE_TOKENS = 128
"""Output tokens for which a new row gets memory at once."""


class Scheduler:
    """All requests of one engine.

    Args:
        model: Runs the steps.
        max_total_tokens: Budget of key-value memory.
        max_running_requests: Most requests worked on at a time.
        prefill_tokens: Most prompt tokens per step.
        share_from_tokens: Prompts from this length on are kept once for all their rows.
        enable_prefix_cache: Whether prompts are kept for later requests.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_total_tokens: int,
        max_running_requests: int,
        prefill_tokens: int,
        share_from_tokens: int,
        enable_prefix_cache: bool = True,
    ) -> None:
        self._model = model
        self._prefill_tokens = prefill_tokens
        self._share_from = share_from_tokens
        self._max_running = max_running_requests
        self._memory = KvMemory(
            model.shape.cache,
            dtype=model.dtype,
            device=model.device,
            max_total_tokens=max_total_tokens,
            enable_prefix_cache=enable_prefix_cache,
        )
        self.budget = self._memory.budget
        self.waiting: deque[Request] = deque()
        self._jobs = PromptJobs(self._memory)
        self._ready: list[tuple[Request, PrefixEntry]] = []
        self._running: dict[Row, Request] = {}
        self._demand: Counter[bytes] = Counter()
        self._is_short = False
        self.weight_version = INITIAL_WEIGHT_VERSION

    @property
    def num_running(self) -> int:
        """Requests that hold key-value memory."""
        return len(self._running) + len(self._ready) + len(self._jobs.requests)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting) or self.num_running > 0

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)
        self._demand[request.prompt.tobytes()] += 1

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, run one forward pass, draw one token per live row."""
        self._admit()
        self._make_room()
        chunks = self._jobs.next_chunks(self._prefill_tokens)
        slabs = [slab for slab in self._memory.pool.slabs.values() if slab.rows]
        decode = DecodeAttention(slabs, self._model.shape.cache) if slabs else None
        rows = decode.rows if decode is not None else []
        logits = self._forward(chunks, decode, rows)
        drawing = [self._running[row] for row in rows]
        for row in rows:
            row.length += 1
        ready, self._ready = self._ready, []
        ready = [(r, e) for r, e in ready if not self._ends_without_output(r, e)]
        if ready:
            firsts = torch.stack([entry.logits for _, entry in ready if entry.logits is not None])
            logits = firsts if logits is None else torch.cat((logits, firsts))
        if logits is not None:
            self._draw(logits, drawing + [request for request, _ in ready])
        # A client learns of the end when the memory is free again: it may look at the load or flush at once.
        for request, entry in ready:
            if request.finish is None:
                self._place(request, entry)
            else:
                self._release_ready(request, entry)
                self._leave(request)
        for request in drawing:
            if request.finish is not None:
                self._drop_row(request, keep=True)
                self._leave(request)

    @torch.inference_mode()
    def abort(self, matches: Callable[[Request], bool], message: str) -> int:
        """End matching requests with what they have; return how many."""
        found = [r for r in self._all() if matches(r)]
        for request in found:
            self._detach(request)
            request.abort(message)
            self._leave(request)
        return len(found)

    @torch.inference_mode()
    def fail(self, error: Exception) -> None:
        """End every request with ``error``."""
        for request in self._all():
            self._detach(request)
            self._leave(request, error)

    @torch.inference_mode()
    def retract(self) -> None:
        """Put everything back into the queue and free its key-value memory; outputs are kept."""
        requests = sorted((r for r in self._all() if r not in self.waiting), key=lambda r: r.created)
        for request in requests:
            request.num_retractions += request.row is not None
            self._detach(request)
        self.waiting.extendleft(reversed(requests))

    def flush(self) -> bool:
        """Forget kept prompts and free unused memory; False, and nothing done, while requests hold memory."""
        if self.num_running:
            return False
        self.forget_prefixes()
        self._memory.pool.free_unused()
        return True

    def forget_prefixes(self) -> None:
        """Make all that is computed unfindable, because the weights change; what is in progress goes on with it."""
        self._memory.prompts.clear()

    def _all(self) -> list[Request]:
        ready = [request for request, _ in self._ready]
        return [*self._running.values(), *ready, *self._jobs.requests, *self.waiting]

    def _admit(self) -> None:
        if self._is_short and self.num_running:
            return  # memory ran out: admitting now would only push someone else out
        self._is_short = False
        while self.waiting and self.num_running < self._max_running:
            request = self.waiting[0]
            if not self._memory.with_room(lambda request=request: self._attach(request), len(request.sequence)):
                if self.num_running == 0:
                    self.waiting.popleft()
                    self._out_of_memory(request)
                    continue
                return
            self.waiting.popleft()

    def _attach(self, request: Request) -> None:
        entry = self._jobs.attach(request)
        if entry is not None:
            self._ready.append((request, entry))

    def _make_room(self) -> None:
        """See that every live row has a place for its next token; put the newest back if memory is short."""
        for row in list(self._running):
            while row in self._running and row.length >= row.slab.width:
                if self._memory.make_room(row):
                    continue
                newest = max(self._running.values(), key=lambda r: r.created)
                if len(self._running) == 1:
                    self._drop_row(newest, keep=False)
                    self._out_of_memory(newest)
                else:
                    self._put_back(newest)

    def _put_back(self, request: Request) -> None:
        if request.row is not None:
            self._drop_row(request, keep=False)
        request.num_retractions += 1
        self.waiting.appendleft(request)
        self._is_short = True

    def _out_of_memory(self, request: Request) -> None:
        request.abort(
            f"{len(request.sequence)} tokens do not fit into the KV cache of {self.budget.capacity} tokens; "
            "raise --max-total-tokens",
            status_code=500,
        )
        self._leave(request)

    def _forward(
        self, chunks: list[tuple[PromptJob, PromptChunk]], decode: DecodeAttention | None, rows: list[Row]
    ) -> Tensor | None:
        """One pass over prompt chunks and rows; returns the rows' logits and stores those of finished prompts."""
        if not chunks and not rows:
            return None
        device = self._model.device
        tokens = [chunk.entry.tokens[chunk.start : chunk.end] for _, chunk in chunks]
        positions = [np.arange(chunk.start, chunk.end) for _, chunk in chunks]
        split = sum(len(part) for part in tokens)
        tokens.append(np.array([self._running[row].output_ids[-1] for row in rows], dtype=np.int32))
        positions.append(np.array([row.position for row in rows], dtype=np.int64))
        wanted: list[int] = []
        counts: list[int] = []
        offset = 0
        for job, chunk in chunks:
            mine = job.wanted(chunk)
            wanted += [offset + position - chunk.start for position in mine]
            counts.append(len(mine))
            offset += chunk.end - chunk.start
        logits = self._model.forward(
            torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device),
            torch.from_numpy(np.concatenate(positions).astype(np.int64)).to(device),
            PromptAttention([chunk for _, chunk in chunks], self._model.shape.cache) if chunks else None,
            decode,
            split,
            torch.tensor([*wanted, *range(split, split + len(rows))], dtype=torch.long, device=device),
        )
        for (job, chunk), part in zip(chunks, logits[: len(wanted)].split(counts) if counts else (), strict=True):
            job.take(chunk, part)
            if job.is_done:
                self._jobs.finish(job)
                self._ready += [(request, job.entry) for request in job.requests]
        return logits[len(wanted) :] if rows else None

    def _ends_without_output(self, request: Request, entry: PrefixEntry) -> bool:
        """Finish a request that only wants its prompt scored."""
        if request.remaining > 0:
            return False
        request.finish = {"type": "length", "length": len(request.output_ids)}
        self._release_ready(request, entry)
        self._leave(request)
        return True

    def _draw(self, logits: Tensor, requests: list[Request]) -> None:
        vocab, device = self._model.shape.vocab_size, self._model.device
        drawn = sample(logits, [request.sample_row(vocab, device) for request in requests])
        for i, request in enumerate(requests):
            top, kept = drawn.top.get(i), drawn.kept.get(i)
            request.append(drawn.tokens[i], drawn.log_probs[i], self.weight_version, top, kept)
            if request.finish is None and request.wants_progress:
                request.progress()

    def _place(self, request: Request, entry: PrefixEntry) -> None:
        """Give a request that has its first token a live row."""
        share = len(entry.tokens) >= self._share_from and self._demand[entry.tokens.tobytes()] > 1
        row = self._memory.place(entry, min(request.remaining, _RESERVE_TOKENS), share=share)
        if row is not None:
            request.row = row
            self._running[row] = request
        elif self._running or len(self._jobs):
            self._put_back(request)
        else:
            self._out_of_memory(request)

    def _drop_row(self, request: Request, *, keep: bool) -> None:
        """Free a request's row; ``keep`` makes the sequence findable for a later turn of the same conversation."""
        row = request.row
        assert row is not None
        if row.shared is not None:
            request.record_routes(row.shared.kv.span(0, row.shared_length))
        request.record_routes(row.kv, start=row.shared_length)
        if keep:
            self._memory.keep(row, request.sequence)
        del self._running[row]
        self._memory.drop(row)
        request.row = None

    def _release_ready(self, request: Request, entry: PrefixEntry) -> None:
        """End a request's use of its computed prompt."""
        request.record_routes(entry.kv)
        self._memory.prompts.release(entry)

    def _detach(self, request: Request) -> None:
        """Take a request out of wherever it is."""
        if request.row is not None:
            self._drop_row(request, keep=False)
            return
        for other, entry in self._ready:
            if other is request:
                self._ready.remove((other, entry))
                self._release_ready(request, entry)
                return
        if not self._jobs.remove(request) and request in self.waiting:
            self.waiting.remove(request)

    def _leave(self, request: Request, error: Exception | None = None) -> None:
        """Report a request that is done."""
        self._is_short = False
        key = request.prompt.tobytes()
        self._demand[key] -= 1
        if self._demand[key] <= 0:
            del self._demand[key]
        request.progress(error)
