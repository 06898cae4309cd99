"""HTTP handlers that answer: generation, health, and what the server is."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from slime.engines import api
from slime.engines.api import GenerateItem, GenerateReply, GenerateRequest, RequestError, parse_generate
from slime.engines.embedded.control import Handler
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.http_json import json_reply, read_json
from slime.engines.embedded.replies import build_reply
from slime.engines.embedded.request import Progress, Request
from slime.engines.embedded.text import StopScanner, Text

_PING_SECONDS = 20.0
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the samples of one request: far apart, so that requests with consecutive seeds share no draws."""


class Serving:
    """Handlers over one engine.

    Args:
        engine: The engine.
        text: Its tokenizer.
        context_length: Longest prompt plus output.
        eos_ids: Tokens that end an output unless ``ignore_eos``.
        seed: Of requests that bring none.
        info: What ``/server_info`` says besides the load.
    """

    def __init__(
        self,
        engine: Engine,
        text: Text,
        *,
        context_length: int,
        eos_ids: Sequence[int],
        seed: int,
        info: dict[str, Any],
    ) -> None:
        self._engine = engine
        self._text = text
        self._context_length = context_length
        self._eos_ids = frozenset(eos_ids)
        self._seeds = random.Random(seed)
        self._info = info

    def routes(self) -> list[tuple[tuple[str, ...], str, Handler]]:
        """(methods, path, handler) of every endpoint."""
        get = ("GET",)
        return [
            (("POST", "PUT"), api.GENERATE, self.generate),
            (get, api.HEALTH, self.health),
            (get, api.READY, self.health),
            (get, api.HEALTH_GENERATE, self.health_generate),
            (get, api.MODEL_INFO, self.model_info),
            (get, "/get_model_info", self.model_info),
            (get, api.SERVER_INFO, self.server_info),
            (get, "/get_server_info", self.server_info),
            (get, api.LOADS, self.loads),
            (get, "/get_load", self.load),
            (get, api.MODELS, self.models),
        ]

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Generate for one prompt or a batch; a client that goes away ends its requests."""
        parsed = parse_generate(await read_json(http))
        prompts = [await self._prompt(item) for item in parsed.items]
        events: asyncio.Queue[Progress] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        requests: list[Request] = []
        for item, prompt in zip(parsed.items, prompts, strict=True):
            requests += self._requests(item, prompt, parsed.stream, loop, events)
        self._engine.submit(requests)
        try:
            if parsed.stream:
                return await self._stream(http, parsed, requests, events)
            replies = await self._collect(requests, events)
        except (asyncio.CancelledError, ConnectionError):
            self._abandon(requests)
            raise
        single = not parsed.is_batch and parsed.items[0].sampling.n == 1
        return json_reply(replies[0] if single else replies)

    async def health(self, _: web.Request) -> web.Response:
        """200 while the model thread lives."""
        return web.Response(status=200 if self._engine.is_healthy else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """200 if the model thread answers, and generates when nothing forbids it."""
        engine = self._engine
        try:
            await asyncio.wait_for(asyncio.wrap_future(engine.call(lambda: None)), _PING_SECONDS)
            idle = engine.paused is None and not engine.is_updating and not engine.released
            if idle and not engine.scheduler.has_work and not engine.model.weights.missing:
                await asyncio.wait_for(self._generate_one(), _PING_SECONDS)
        except (TimeoutError, RequestError):
            return web.Response(status=503)
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        """What model this is."""
        keys = ("model_path", "served_model_name", "tokenizer_path", "model_type", "architectures", "load_format")
        info = {key: self._info[key] for key in keys}
        fixed = {"is_generation": True, "preferred_sampling_params": None, "has_image_understanding": False}
        return json_reply(info | fixed | {"weight_version": self._engine.weight_version, "disaggregation_mode": "null"})

    async def server_info(self, _: web.Request) -> web.Response:
        """Arguments and state of the server."""
        engine = self._engine
        state = {"weight_version": engine.weight_version, **self._load(), "paused": engine.paused}
        state |= {"released": sorted(engine.released), "is_updating": engine.is_updating}
        return json_reply(self._info | {"weight_version": engine.weight_version, "internal_states": [state]})

    async def loads(self, _: web.Request) -> web.Response:
        """Counts per data-parallel rank; there is one."""
        return json_reply({"timestamp": time.time(), "dp_rank_count": 1, "loads": [self._load()]})

    async def load(self, _: web.Request) -> web.Response:
        """Counts in the older shape."""
        return json_reply([self._load()])

    async def models(self, _: web.Request) -> web.Response:
        """The OpenAI shape of the model list."""
        entry = {"id": self._info["served_model_name"], "object": "model", "owned_by": "slime"}
        return json_reply({"object": "list", "data": [entry | {"max_model_len": self._context_length}]})

    def _load(self) -> dict[str, int]:
        load = self._engine.load
        return {
            "dp_rank": 0,
            "num_reqs": load.running + load.waiting,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_tokens": load.tokens,
        }

    async def _prompt(self, item: GenerateItem) -> list[int]:
        ids = list(item.input_ids) if item.input_ids is not None else None
        if ids is None:
            assert item.text is not None
            ids = await asyncio.to_thread(self._text.encode, item.text)
            if not ids:
                raise RequestError("text has no tokens; accepted: a prompt of at least one token")
        vocab = self._engine.model.shape.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(t for t in ids if not 0 <= t < vocab)
            raise RequestError(f"input_ids has {wrong}; accepted: token ids in [0, {vocab})")
        self._check_routes(item, len(ids))
        limit, wanted = self._context_length, item.sampling.max_new_tokens
        if len(ids) >= limit:
            raise RequestError(
                f"The input ({len(ids)} tokens) is longer than the model's context length ({limit} tokens)."
            )
        for bound, name in ((limit, "context length"), (self._engine.scheduler.budget.capacity, "KV cache")):
            if len(ids) + wanted > bound:
                raise RequestError(
                    f"Requested token count exceeds the {name} of {bound} tokens: {len(ids)} of the input and "
                    f"{wanted} of max_new_tokens. Lower max_new_tokens to {max(0, bound - len(ids))} or less."
                )
        return ids

    def _check_routes(self, item: GenerateItem, prompt_length: int) -> None:
        if not item.return_routed_experts:
            return
        if self._engine.model.shape.experts is None:
            raise RequestError("return_routed_experts needs a model with experts; this one has none")
        if item.routed_experts_start_len > prompt_length:
            raise RequestError(
                f"routed_experts_start_len is {item.routed_experts_start_len}; accepted: at most the {prompt_length} "
                "prompt tokens"
            )

    def _requests(
        self,
        item: GenerateItem,
        prompt: Sequence[int],
        stream: bool,
        loop: asyncio.AbstractEventLoop,
        events: asyncio.Queue[Progress],
    ) -> list[Request]:
        """The ``n`` samples of one prompt; the first draws with the given seed."""
        params = item.sampling
        parent = item.rid or uuid.uuid4().hex
        seed = params.sampling_seed if params.sampling_seed is not None else self._seeds.getrandbits(62)
        # As in SGLang: who ignores the end of the text ignores every token that could stand for it.
        stop_ids = frozenset[int]() if params.ignore_eos else frozenset(params.stop_token_ids) | self._eos_ids
        array = np.array(prompt, dtype=np.int32)
        scans = bool(params.stop or params.stop_regex)
        if scans and self._text.path is None:
            raise RequestError("stop strings need a tokenizer, and the server runs with --skip-tokenizer-init")

        def notify(progress: Progress) -> None:
            loop.call_soon_threadsafe(events.put_nowait, progress)

        return [
            Request(
                rid=parent if params.n == 1 else f"{parent}_{i}",
                parent_rid=parent,
                item=item,
                prompt=array,
                seed=seed + i * _SEED_STRIDE,
                stop_ids=stop_ids,
                scanner=StopScanner(self._text, params) if scans else None,
                notify=notify,
                wants_progress=stream,
            )
            for i in range(params.n)
        ]

    async def _collect(self, requests: Sequence[Request], events: asyncio.Queue[Progress]) -> list[GenerateReply]:
        """Replies in the order of the requests. Bounded by the engine: it ends every request, or fails them all."""
        done: dict[str, Progress] = {}
        while len(done) < len(requests):
            progress = await events.get()
            if progress.error is not None:
                self._abandon(requests)
                raise progress.error
            done[progress.request.rid] = progress
        return [await self._reply(done[request.rid]) for request in requests]

    async def _reply(self, progress: Progress) -> GenerateReply:
        if self._text.is_loaded or self._text.path is None:
            return build_reply(progress, self._text, self._engine.weight_version)
        return await asyncio.to_thread(build_reply, progress, self._text, self._engine.weight_version)

    async def _stream(
        self, http: web.Request, parsed: GenerateRequest, requests: Sequence[Request], events: asyncio.Queue[Progress]
    ) -> web.StreamResponse:
        """Server-sent events; each carries everything so far, so a slow reader may miss some."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        index = {request.rid: i for i, request in enumerate(requests)}
        left = len(requests)
        while left:
            newest: dict[str, Progress] = {}
            progress = await events.get()
            newest[progress.request.rid] = progress
            while not events.empty():
                progress = events.get_nowait()
                newest[progress.request.rid] = progress
            for progress in newest.values():
                left -= progress.is_last
                await response.write(b"data: " + await self._chunk(progress, index, len(requests) > 1) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _chunk(self, progress: Progress, index: dict[str, int], several: bool) -> bytes:
        if progress.error is not None:
            return orjson.dumps({"error": {"message": str(progress.error)}})
        reply: dict[str, Any] = dict(await self._reply(progress))
        if several:
            reply["index"] = index[progress.request.rid]
        return orjson.dumps(reply)

    def _abandon(self, requests: Sequence[Request]) -> None:
        """End requests that nobody waits for any more."""
        gone = {id(request) for request in requests}
        self._engine.call(lambda: self._engine.scheduler.abort(lambda r: id(r) in gone, "The client went away"))

    async def _generate_one(self) -> None:
        item = parse_generate({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).items[0]
        events: asyncio.Queue[Progress] = asyncio.Queue()
        requests = self._requests(item, [0], False, asyncio.get_running_loop(), events)
        self._engine.submit(requests)
        progress = await events.get()
        if progress.error is not None:
            raise progress.error
