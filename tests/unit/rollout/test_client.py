"""EngineClient against a real server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from slime.errors import EngineError, WaitTimeoutError
from slime.rollout import client as client_module
from slime.rollout.client import ClientTimeouts, EngineClient
from tests.support.fake_engine import FakeEngine

PAYLOAD = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client_module, "RETRY_PAUSE_SECONDS", 0.01)


def bounds(**changes) -> ClientTimeouts:
    values = {"connect_seconds": 1.0, "request_seconds": 5.0, "control_seconds": 1.0, "abort_seconds": 1.0}
    return ClientTimeouts(**{**values, **changes})


async def test_generate_returns_the_reply():
    with FakeEngine() as engine:
        async with EngineClient(engine.url, timeouts=bounds()) as client:
            reply = await client.generate(PAYLOAD, headers={"X-Key": "abc"})
    assert len(reply["output_ids"]) == 3
    assert engine.requests == [PAYLOAD]
    assert engine.headers[0]["X-Key"] == "abc"


@pytest.mark.parametrize("fault", [429, 500, 503, 408, "reset"])
async def test_transient_faults_are_retried(fault):
    with FakeEngine() as engine:
        engine.faults.extend([fault, fault])
        async with EngineClient(engine.url, timeouts=bounds()) as client:
            reply = await client.generate(PAYLOAD)
    assert len(reply["output_ids"]) == 3
    assert len(engine.requests) == 3


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_refusals_raise_at_once_with_the_body(status):
    with FakeEngine() as engine:
        engine.faults.append(status)
        async with EngineClient(engine.url, timeouts=bounds()) as client:
            with pytest.raises(EngineError, match=f"HTTP {status}.*fault {status}"):
                await client.generate(PAYLOAD)
    assert len(engine.requests) == 1


async def test_an_engine_that_only_fails_is_an_engine_error_after_the_last_attempt():
    with FakeEngine() as engine:
        engine.faults.extend([500] * 10)
        async with EngineClient(engine.url, timeouts=bounds(max_retries=2)) as client:
            with pytest.raises(EngineError, match=r"in 3 attempts.*HTTP 500"):
                await client.generate(PAYLOAD)
    assert len(engine.requests) == 3


async def test_garbage_is_an_engine_error_with_the_body():
    with FakeEngine() as engine:
        engine.faults.append("garbage")
        async with EngineClient(engine.url, timeouts=bounds()) as client:
            with pytest.raises(EngineError, match="not an engine"):
                await client.generate(PAYLOAD)


async def test_a_hanging_engine_costs_the_stated_time():
    with FakeEngine() as engine:
        engine.faults.append("hang")
        async with EngineClient(engine.url, timeouts=bounds(request_seconds=0.3)) as client:
            started = time.monotonic()
            with pytest.raises(WaitTimeoutError, match=r"rollout process waited .* for POST .*/generate"):
                await client.generate(PAYLOAD)
            assert 0.25 < time.monotonic() - started < 0.8


async def test_a_dead_engine_is_a_wait_that_expired():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        async with EngineClient(url, timeouts=bounds(max_retries=1)) as client:
            with pytest.raises(WaitTimeoutError, match="2 attempts"):
                await client.generate(PAYLOAD)


async def test_workers_of_a_router_and_of_a_bare_engine():
    with FakeEngine() as engine, FakeEngine(workers=[engine.url + "/"]) as router:
        async with EngineClient(router.url, timeouts=bounds()) as client:
            assert await client.worker_urls() == [engine.url]
            assert await client.healthy_worker_urls() == [engine.url]
        async with EngineClient(engine.url, timeouts=bounds()) as client:
            assert await client.worker_urls() == [engine.url]


async def test_abort_all_ends_running_requests_on_every_worker():
    slow = {"latency_seconds": 30}
    with FakeEngine(**slow) as one, FakeEngine(**slow) as two, FakeEngine(workers=[one.url, two.url]) as router:
        async with EngineClient(router.url, timeouts=bounds()) as client:
            jobs = [asyncio.create_task(client.generate(PAYLOAD, base_url=e.url)) for e in (one, two)]
            await asyncio.gather(one.until_running(1), two.until_running(1))
            await client.abort_all()
            replies = await asyncio.wait_for(asyncio.gather(*jobs), 1)
    assert [r["meta_info"]["finish_reason"]["type"] for r in replies] == ["abort", "abort"]


async def test_abort_all_is_bounded():
    with FakeEngine(latency_seconds=2) as engine:
        engine.ignore_aborts = True
        async with EngineClient(engine.url, timeouts=bounds(abort_seconds=0.2)) as client:
            job = asyncio.create_task(client.generate(PAYLOAD))
            await engine.until_running(1)
            with pytest.raises(WaitTimeoutError, match="1 requests still run"):
                await client.abort_all()
            job.cancel()


async def test_abort_all_waits_for_every_worker_before_it_raises():
    with (
        FakeEngine(latency_seconds=2) as stuck,
        FakeEngine(latency_seconds=30) as slow,
        FakeEngine(workers=[stuck.url, slow.url]) as router,
    ):
        stuck.ignore_aborts, slow.abort_latency_seconds = True, 0.4
        async with EngineClient(router.url, timeouts=bounds(abort_seconds=0.2)) as client:
            jobs = [asyncio.create_task(client.generate(PAYLOAD, base_url=e.url)) for e in (stuck, slow)]
            await asyncio.gather(stuck.until_running(1), slow.until_running(1))
            with pytest.raises(WaitTimeoutError, match="1 requests still run"):
                await client.abort_all()
            assert (slow.running, slow.cut_aborts) == (0, 0)
            for job in jobs:
                job.cancel()


async def test_abort_all_passes_over_a_dead_worker():
    with FakeEngine() as router:
        pass  # its port is free again
    with FakeEngine(workers=[router.url]) as lister:
        async with EngineClient(lister.url, timeouts=bounds()) as client:
            await client.abort_all()


async def test_post_decodes_json_else_text():
    with FakeEngine() as engine:
        async with EngineClient(engine.url, timeouts=bounds()) as client:
            assert await client.post(f"{engine.url}/echo", {"a": 1}) == {"a": 1}
            engine.faults.append("garbage")
            assert await client.post(f"{engine.url}/echo", {}) == "<html>not an engine</html>"


async def test_calls_from_another_loop_are_carried_over():
    with FakeEngine() as engine:
        async with EngineClient(engine.url, timeouts=bounds()) as client:
            replies: list[dict] = []
            thread = threading.Thread(target=lambda: replies.append(asyncio.run(client.generate(PAYLOAD))))
            thread.start()
            await asyncio.to_thread(thread.join, 5)
    assert len(replies[0]["output_ids"]) == 3


async def test_a_client_that_is_not_open_says_so():
    with pytest.raises(RuntimeError, match="not open"):
        await EngineClient("http://127.0.0.1:1").generate(PAYLOAD)
