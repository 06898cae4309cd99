"""A real SGLang server that loses its scheduler or freezes while it generates, beside an engine that stays."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from slime.cluster.health import HealthMonitor, health_problem
from slime.http_control import request
from slime.rollout.client import ClientTimeouts, EngineClient
from slime.rollout.reissue import Reissues
from tests.sglang.servers import Server, end, sglang_server
from tests.support.engine_process import engine_process, router_process
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.timeout(300)]

NUM_REQUESTS, NUM_TOKENS = 24, 1500  # enough to be at work while a health check takes its second


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    with sglang_server(make_tiny_model(tmp_path / "model", "qwen3")) as running:
        yield running


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_of_a_lost_server_are_answered_by_another_engine(server: Server, signum: signal.Signals) -> None:
    """As the driver does: the health check fails, and killing the server frees its requests."""
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def kill(name: str, url: str, reason: str) -> None:
        end(server)
        loop.call_soon_threadsafe(failed.set)

    with engine_process(server.model_path) as other, router_process([server.url, other]) as router:
        health = f"{server.url}/health_generate"
        reissues = Reissues()
        timeouts = ClientTimeouts(request_seconds=120.0, control_seconds=5.0)
        monitor = HealthMonitor(
            lambda: {"engine 0": health},
            kill,
            interval_seconds=1.0,
            timeout_seconds=3.0,
            first_wait_seconds=0.0,
        )
        async with EngineClient(router, timeouts=timeouts, reissues=reissues) as client:
            jobs = [asyncio.create_task(client.generate(payload(i))) for i in range(NUM_REQUESTS)]
            await asyncio.to_thread(until_busy, server.url)
            # A server under load is well: it need not generate for the check, only go on.
            assert await asyncio.to_thread(health_problem, health, 5.0, 1) is None
            assert not all(job.done() for job in jobs)
            os.kill(scheduler_of(server), signum)
            monitor.start()
            monitor.resume()
            started = time.monotonic()
            try:
                await asyncio.wait_for(failed.wait(), 20)
                replies = await asyncio.wait_for(asyncio.gather(*jobs), 60)
            finally:
                monitor.close()
    assert time.monotonic() - started < 60
    assert Counter(len(reply["output_ids"]) for reply in replies) == {NUM_TOKENS: NUM_REQUESTS}


def payload(number: int) -> dict[str, object]:
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    return {"input_ids": [65, 66, 67 + number], "sampling_params": sampling, "return_logprob": True}


def until_busy(url: str) -> None:
    give_up_at = time.monotonic() + 20
    while not request(f"{url}/v1/loads?include=core", timeout_seconds=5)["loads"][0]["num_running_reqs"]:
        assert time.monotonic() < give_up_at, "no request arrived"
        time.sleep(0.05)


def scheduler_of(server: Server) -> int:
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if "scheduler" in child.name() or any("scheduler" in word for word in child.cmdline()):
            return child.pid
    raise AssertionError("no scheduler process")
