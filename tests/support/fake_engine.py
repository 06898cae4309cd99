"""An engine without a model: a real HTTP server with deterministic answers, latency and faults on demand.

Owns what no real engine does when asked to: answer 500, answer garbage, drop the connection, hang. It speaks the part
of the engine contract that a rollout uses, runs in a thread of its own, and can list itself as a router would.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

Fault = str | int
"""An HTTP status to answer, or a way to fail: see ``FakeEngine._fault``."""


@dataclass
class Answer:
    """What the engine generates for one request."""

    token_ids: list[int]
    text: str
    finish_reason: dict[str, Any] = field(default_factory=lambda: {"type": "stop", "matched": "end"})


def default_answer(input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Answer:
    """Three printable bytes that depend on the prompt, or fewer if fewer are allowed."""
    count = min(3, sampling_params.get("max_new_tokens", 128))
    ids = [33 + (sum(input_ids) + i) % 64 for i in range(count)]
    reason = {"type": "length", "length": count} if count < 3 else {"type": "stop", "matched": "end"}
    return Answer(ids, "".join(chr(i) for i in ids), reason)


class FakeEngine:
    """A server on a free local port; a context manager.

    Args:
        answer: Prompt ids and sampling parameters to an answer.
        latency_seconds: How long a generation takes; an abort ends it earlier with its first token only.
        workers: What ``/workers`` lists; None for a bare engine, which has no such route.
        sampling_masks: Whether ``return_sampling_mask`` is known; each token then has a kept set of itself and 7.
        routes: Layers and (even) top-k of the routed experts that ``return_routed_experts`` gets; None if unknown.
    """

    def __init__(
        self,
        answer: Callable[[list[int], dict[str, Any]], Answer] = default_answer,
        latency_seconds: float = 0.0,
        workers: list[str] | None = None,
        sampling_masks: bool = False,
        routes: tuple[int, int] | None = None,
    ) -> None:
        self.answer = answer
        self.latency_seconds = latency_seconds
        self.workers = workers
        self.sampling_masks = sampling_masks
        self.routes = routes
        self.faults: deque[Fault] = deque()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts = 0
        self.abort_latency_seconds = 0.0
        self.cut_aborts = 0
        self.running = 0
        self.max_running = 0
        self.weight_version = "1"
        self.ignore_aborts = False
        self.bare_aborts = False  # answer an abort without log-probs, as SGLang does for what waits in its queue
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._aborted = asyncio.Event()
        self._started = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="fake-engine", daemon=True)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        assert self._started.wait(10), "the fake engine did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def switch(self, version: str, after_seconds: float = 0.0) -> None:
        """New weights: what generates then ends with its first token, as in an update that aborts."""

        def change() -> None:
            self.weight_version = version
            self._aborted.set()
            self._aborted = asyncio.Event()

        self._loop.call_soon_threadsafe(self._loop.call_later, after_seconds, change)

    async def until_running(self, count: int) -> None:
        """Wait until ``count`` generations run at the same time."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self.running >= count, 10)

        assert await asyncio.to_thread(wait), f"{self.running} generations run, expected {count}"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._started.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/echo", self._echo)
        if self.workers is not None:
            app.router.add_get("/workers", self._list_workers)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        if self.workers == []:
            self.workers.append(self.url)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        faulty = await self._fault(request)
        if faulty is not None:
            return faulty
        answer = self.answer(body["input_ids"], body["sampling_params"])
        version = self.weight_version
        with self._changed:
            self.running += 1
            self.max_running = max(self.max_running, self.running)
            self._changed.notify_all()
        try:
            aborted = await self._generate_for(self.latency_seconds)
        finally:
            self.running -= 1
        if aborted:
            answer = Answer(
                answer.token_ids[:1], answer.text[:1], {"type": "abort", "message": "aborted", "status_code": None}
            )
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": answer.finish_reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": len(body["input_ids"]) // 2,
            "weight_version": version,
            "output_token_logprobs": [[-0.5 - i / 100, t, None] for i, t in enumerate(answer.token_ids)],
        }
        if aborted and self.bare_aborts:
            del meta["output_token_logprobs"]
        if self.sampling_masks and body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[t, 7] for t in answer.token_ids]
            meta["output_token_sampling_logprobs"] = [-0.25 - i / 100 for i in range(len(answer.token_ids))]
        if self.routes is not None and body.get("return_routed_experts"):
            # Both numbers of a route tell where it comes from: the position of the token, and the request.
            start, end = body["routed_experts_start_len"], len(body["input_ids"]) + len(answer.token_ids) - 1
            layers, topk = self.routes
            rows = [[[i, len(self.requests)] * (topk // 2)] * layers for i in range(start, end)]
            meta["routed_experts"] = base64.b64encode(np.array(rows, dtype=np.int32).tobytes()).decode()
        return web.json_response({"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta})

    async def _fault(self, request: web.Request) -> web.StreamResponse | None:
        if not self.faults:
            return None
        fault = self.faults.popleft()
        if isinstance(fault, int):
            return web.json_response({"error": {"message": f"fault {fault}"}}, status=fault)
        if fault == "garbage":
            return web.Response(text="<html>not an engine</html>")
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault == "half":
            half = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
            await half.prepare(request)
            await half.write(b'{"text": "half of an ans')
            assert request.transport is not None
            request.transport.close()
            return half
        if fault == "no meta":
            return web.json_response({"text": "abc"})
        if fault == "columns":
            reason = {"type": "stop", "matched": "end"}
            meta = {"finish_reason": reason, "output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, None]]}
            return web.json_response({"text": "abc", "output_ids": [7], "meta_info": meta})
        if fault == "unreachable":  # as a router says of an engine
            headers = {"x-smg-error-code": "call_upstream_request_error"}
            return web.json_response({"error": {"message": "unreachable"}}, status=500, headers=headers)
        assert fault == "hang", fault
        await asyncio.sleep(3600)
        return None

    async def _generate_for(self, seconds: float) -> bool:
        """Whether an abort came first."""
        if seconds <= 0:
            return False
        if self.ignore_aborts:
            await asyncio.sleep(seconds)
            return False
        try:
            await asyncio.wait_for(self._aborted.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _abort(self, request: web.Request) -> web.Response:
        assert (await request.json())["abort_all"] is True
        self.aborts += 1
        self._aborted.set()  # wakes what waits now, and nothing that comes later
        self._aborted = asyncio.Event()
        try:
            await asyncio.sleep(self.abort_latency_seconds)
        except asyncio.CancelledError:  # the client has gone away
            self.cut_aborts += 1
            raise
        return web.Response()

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    async def _list_workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": url, "is_healthy": True} for url in self.workers or []]})

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        faulty = await self._fault(request)
        return faulty if faulty is not None else web.json_response(await request.json())
