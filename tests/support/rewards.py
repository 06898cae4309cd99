"""Arguments, samples and a reward server for tests of grading."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from slime.types import Sample


def reward_args(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "rm_type": None,
        "rm_url": None,
        "rm_timeout": 20.0,
        "rm_workers": 2,
        "custom_rm_path": None,
        "custom_rm_model_path": None,
        "hf_checkpoint": "/models/base",
        "reward_key": None,
        "eval_reward_key": None,
    }
    return SimpleNamespace(**{**values, **changes})


def hang(response: str, label: Any, metadata: Any) -> None:
    """A grader that never answers."""
    time.sleep(60)


def answered(response: str, label: Any = "7", **fields: Any) -> Sample:
    return Sample(prompt="p", response=response, label=label, **fields)


class RewardServer:
    """A real server that fails as often as it is told before it answers."""

    def __init__(self, statuses: list[int]) -> None:
        self.statuses = statuses
        self.payloads: list[Any] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.payloads.append(await request.json())
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 299:
            return web.Response(text="not json")
        if status == 297:
            await asyncio.sleep(0.1)
            return web.json_response(0.75)
        if status == 298:
            await asyncio.sleep(60)
        if status != 200:
            return web.Response(status=status, text="because")
        return web.json_response(0.75)

    async def start(self) -> TestServer:
        app = web.Application()
        app.router.add_post("/score", self.handle)
        server = TestServer(app, shutdown_timeout=0.1)
        await server.start_server()
        return server
