"""HTTP handlers that steer the engine: pauses, caches, memory, weights."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from aiohttp import web
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.engines import api
from slime.engines.api import RequestError, parse_message
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.http_json import json_reply, read_json
from slime.engines.embedded.payload import flat_tensors, read_shared_tensors
from slime.engines.embedded.shape import DTYPES
from slime.errors import EngineError, SlimeError, WaitTimeoutError
from slime.weights.groups import join_group, leave_group

_CALL_TIMEOUT_SECONDS = 600.0
_GROUP_TIMEOUT_SECONDS = 300.0
_FLUSH_POLL_SECONDS = 0.02

Result = TypeVar("Result")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control:
    """Handlers over one engine.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: dict[str, ProcessGroup] = {}
        self._snapshot: dict[str, str] | None = None

    def routes(self) -> list[tuple[tuple[str, ...], str, Handler]]:
        """(methods, path, handler) of every control endpoint."""
        post = ("POST",)
        both = ("GET", "POST")
        return [
            (post, api.ABORT_REQUEST, self.abort),
            (post, api.PAUSE_GENERATION, self.pause),
            (post, api.CONTINUE_GENERATION, self.resume),
            (both, api.FLUSH_CACHE, self.flush),
            (both, api.RELEASE_MEMORY_OCCUPATION, self.release),
            (both, api.RESUME_MEMORY_OCCUPATION, self.reoccupy),
            (post, api.BEGIN_WEIGHT_UPDATE, self.begin_update),
            (post, api.END_WEIGHT_UPDATE, self.end_update),
            (post, api.UPDATE_WEIGHTS_FROM_TENSOR, self.update_from_tensor),
            (post, api.INIT_WEIGHTS_UPDATE_GROUP, self.init_group),
            (post, api.DESTROY_WEIGHTS_UPDATE_GROUP, self.destroy_group),
            (post, api.UPDATE_WEIGHTS_FROM_DISTRIBUTED, self.update_from_distributed),
            (post, api.UPDATE_WEIGHTS_FROM_DISK, self.update_from_disk),
            (post, api.UPDATE_WEIGHT_VERSION, self.update_version),
            (both, api.WEIGHTS_CHECKER, self.check_weights),
            (both, api.GET_WEIGHTS_BY_NAME, self.get_weights),
        ]

    async def abort(self, request: web.Request) -> web.Response:
        """End requests; always 200."""
        message = parse_message(api.AbortMessage, await read_json(request))
        await self._on_worker(lambda: self._engine.abort(message.rid, message.abort_all))
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        """Stop generating."""
        message = parse_message(api.PauseMessage, await read_json(request))
        await self._on_worker(lambda: self._engine.pause(message.mode))
        return json_reply({"message": "Generation paused", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        """Generate again."""
        parse_message(api.ContinueMessage, await read_json(request))
        await self._on_worker(self._engine.resume)
        return json_reply({"message": "Generation continued", "status": "ok"})

    async def flush(self, request: web.Request) -> web.Response:
        """Forget kept prompts; waits up to ``timeout`` seconds for requests to end."""
        try:
            timeout = float(request.query.get("timeout", "0"))
        except ValueError as error:
            raise RequestError(f"timeout is {request.query['timeout']!r}; accepted: seconds as a number") from error
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not await self._on_worker(self._engine.flush):
            if loop.time() >= deadline:
                load = self._engine.load
                text = (
                    f"Cache not flushed: {load.running} requests running, {load.waiting} waiting. Pause them first.\n"
                )
                return web.Response(status=400, text=text)
            await asyncio.sleep(_FLUSH_POLL_SECONDS)
        return web.Response(text="Cache flushed.\n")

    async def release(self, request: web.Request) -> web.Response:
        """Free memory by tag."""
        tags = parse_message(api.MemoryMessage, await read_json(request)).tags or list(api.MEMORY_TAGS)
        await self._on_worker(lambda: self._engine.release(tags))
        return json_reply(None)

    async def reoccupy(self, request: web.Request) -> web.Response:
        """Allow memory to be used again."""
        tags = parse_message(api.MemoryMessage, await read_json(request)).tags
        await self._on_worker(
            lambda: self._engine.reoccupy(tags if tags is not None else sorted(self._engine.released))
        )
        return json_reply(None)

    async def begin_update(self, request: web.Request) -> web.Response:
        """Open a weight update."""
        parse_message(api.BeginUpdateMessage, await read_json(request))
        return await self._update(lambda: self._engine.begin_update() or "begun")

    async def end_update(self, request: web.Request) -> web.Response:
        """Close a weight update."""
        parse_message(api.EndUpdateMessage, await read_json(request))
        return await self._update(self._engine.end_update)

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """Take tensors from shared memory of this machine."""
        message = parse_message(api.UpdateFromTensorMessage, await read_json(request))

        def update() -> str:
            self._engine.require_update()
            tensors = read_shared_tensors(message.serialized_named_tensors, message.load_format)
            count = len(tensors)
            try:
                self._write(tensors, message)
            finally:
                tensors.clear()  # give the sender's memory back, also when an exception keeps this frame
            return f"{count} tensors updated"

        return await self._update(update)

    async def init_group(self, request: web.Request) -> web.Response:
        """Join a trainer's process group; generation goes on meanwhile."""
        message = parse_message(api.InitGroupMessage, await read_json(request))
        if message.group_name in self._groups:
            raise RequestError(f"group {message.group_name!r} exists; destroy it first")

        def join() -> ProcessGroup:
            return join_group(
                master_address=message.master_address,
                master_port=message.master_port,
                rank=message.rank_offset,
                world_size=message.world_size,
                name=message.group_name,
                backend=message.backend,
                timeout_seconds=_GROUP_TIMEOUT_SECONDS,
            )

        try:
            self._groups[message.group_name] = await asyncio.to_thread(join)
        except (SlimeError, RuntimeError, ValueError) as error:
            return json_reply({"success": False, "message": f"group {message.group_name!r}: {error}"}, status=400)
        return json_reply({"success": True, "message": f"joined group {message.group_name!r}"})

    async def destroy_group(self, request: web.Request) -> web.Response:
        """Leave a trainer's process group."""
        message = parse_message(api.DestroyGroupMessage, await read_json(request))
        group = self._groups.pop(message.group_name, None)
        if group is None:
            return json_reply({"success": False, "message": f"no group {message.group_name!r}"}, status=400)
        await self._on_worker(lambda: leave_group(group))
        return json_reply({"success": True, "message": f"left group {message.group_name!r}"})

    async def update_from_distributed(self, request: web.Request) -> web.Response:
        """Receive tensors that the trainer broadcasts."""
        message = parse_message(api.UpdateFromDistributedMessage, await read_json(request))
        group = self._groups.get(message.group_name)
        if group is None:
            raise RequestError(f"no group {message.group_name!r}; send {api.INIT_WEIGHTS_UPDATE_GROUP} first")
        dtypes = [_dtype(name) for name in message.dtypes]

        def update() -> str:
            weights, device = self._engine.model.weights, self._engine.model.device
            layout = list(zip(message.names, message.shapes, dtypes, strict=True))
            # Received even if it does not fit: the trainer is in the broadcast already and would hang.
            try:
                tensors = _receive(layout, group, device, is_flat=message.load_format is not None)
            except RuntimeError as error:
                raise EngineError(f"group {message.group_name!r} broke off: {error}") from error
            for name, shape, dtype in layout:
                weights.check(name, shape, dtype)
            self._write(tensors, message)
            return f"{len(tensors)} tensors updated"

        return await self._update(update)

    async def update_from_disk(self, request: web.Request) -> web.Response:
        """Load a model directory."""
        message = parse_message(api.UpdateFromDiskMessage, await read_json(request))

        def update() -> str:
            self._engine.load_from_disk(message)
            return f"loaded {message.model_path}"

        paused = self._engine.load.running
        return await self._update(update, extra={"num_paused_requests": paused})

    async def update_version(self, request: web.Request) -> web.Response:
        """Rename the present weights."""
        message = parse_message(api.UpdateVersionMessage, await read_json(request))
        version = message.new_version
        return await self._update(
            lambda: self._engine.set_version(version, message.abort_all_requests) or f"version is {version}",
            extra={"new_version": version},
        )

    async def check_weights(self, request: web.Request) -> web.Response:
        """Checksums of what is held; comparison with those of an earlier moment."""
        message = parse_message(api.WeightsCheckerMessage, await read_json(request))
        action, skip = message.action, message.skip_tensor_list or []
        weights = self._engine.model.weights
        if action == "reset_tensors":
            await self._on_worker(self._engine.reset_weights)
            return json_reply(
                {"success": True, "message": "every tensor is zero", "ranks": [], "per_engine_checksum": None}
            )
        checksums = await self._on_worker(lambda: weights.checksums(skip))
        problem = ""
        if action == "snapshot":
            self._snapshot = checksums
        elif action == "compare":
            if self._snapshot is None:
                raise RequestError("nothing to compare with; send action snapshot first")
            different = [name for name, value in checksums.items() if self._snapshot.get(name) != value]
            problem = f"{len(different)} tensors differ from the snapshot, such as {different[0]}" if different else ""
        whole = xxhash.xxh3_128("".join(f"{k}{v}" for k, v in sorted(checksums.items())).encode()).hexdigest()
        reply: dict[str, Any] = {"success": not problem, "message": problem}
        reply |= {"ranks": [{"checksums": checksums}], "per_engine_checksum": whole}
        return json_reply(reply, status=400 if problem else 200)

    async def get_weights(self, request: web.Request) -> web.Response:
        """First rows of one tensor."""
        message = parse_message(api.GetWeightMessage, await read_json(request))
        read = self._engine.model.weights.read
        rows = await self._on_worker(lambda: read(message.name)[: message.truncate_size].float().tolist())
        return json_reply(rows)

    def _write(
        self, tensors: list[tuple[str, Tensor]], message: api.UpdateFromTensorMessage | api.UpdateFromDistributedMessage
    ) -> None:
        self._engine.write_weights(
            tensors,
            version=message.weight_version,
            flush=message.flush_cache,
            abort_all=message.abort_all_requests,
        )

    async def _update(self, function: Callable[[], str], extra: dict[str, Any] | None = None) -> web.Response:
        """Run an update; a refusal is ``success: false`` with the reason."""
        try:
            text = await self._on_worker(function)
        except (RequestError, SlimeError) as error:
            return json_reply({"success": False, "message": str(error), **(extra or {})}, status=400)
        return json_reply({"success": True, "message": text, **(extra or {})})

    async def _on_worker(self, function: Callable[[], Result]) -> Result:
        future: Future[Result] = self._engine.call(function)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), _CALL_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"the HTTP side waited {_CALL_TIMEOUT_SECONDS:.0f} s for the engine's model thread"
            ) from error


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise RequestError(f"dtypes has {name!r}; accepted: {', '.join(DTYPES)}")
    return dtype


def _receive(
    layout: Sequence[tuple[str, list[int], torch.dtype]], group: ProcessGroup, device: torch.device, *, is_flat: bool
) -> list[tuple[str, Tensor]]:
    """Tensors that the trainer broadcasts: one by one, or as the bytes of all."""
    if not is_flat:
        tensors = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, shape, dtype in layout]
        for _, tensor in tensors:
            dist.broadcast(tensor, src=0, group=group)
        return tensors
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in layout]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(flat, src=0, group=group)
    starts = itertools.accumulate(sizes, initial=0)
    return flat_tensors(flat, [(*row, start) for row, start in zip(layout, starts, strict=False)])
