"""Requests that are issued again, against real servers that misbehave on demand."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from slime.errors import EngineError
from slime.rollout import client as client_module
from slime.rollout import workers
from slime.rollout.client import ClientTimeouts, EngineClient
from slime.rollout.generate import generate_and_rm_group
from slime.rollout.reissue import Reissues
from slime.types import Sample, Status
from tests.support.fake_engine import FakeEngine
from tests.support.rollout_args import open_context

PAYLOAD = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
BOUNDS = ClientTimeouts(connect_seconds=1.0, request_seconds=5.0, control_seconds=1.0, abort_seconds=1.0, max_retries=1)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client_module, "RETRY_PAUSE_SECONDS", 0.001)


@pytest.fixture
def engines():
    with FakeEngine() as one, FakeEngine() as two:
        yield one, two


@pytest.fixture
def router(engines):
    """Stands for the router and for the engine that it chose: its answers are what came through."""
    with FakeEngine(workers=[engine.url for engine in engines]) as running:
        yield running


def client_of(router: FakeEngine) -> EngineClient:
    return EngineClient(router.url, timeouts=BOUNDS, reissues=Reissues())


@pytest.mark.parametrize("fault", [500, 503, 429, "garbage", "reset", "half", "no meta", "unreachable"])
async def test_what_brought_no_answer_goes_straight_to_an_engine(router, engines, fault):
    router.faults.append(fault)
    async with client_of(router) as client:
        reply = await client.generate(PAYLOAD)
        assert client.reissues.count == 1
    assert len(reply["output_ids"]) == 3
    assert len(router.requests) == 1
    assert [request for engine in engines for request in engine.requests] == [PAYLOAD]


async def test_an_engine_is_not_asked_again_while_there_is_another(router, engines):
    one, two = engines
    one.faults.extend(["garbage"] * 9)
    async with client_of(router) as client:
        for _ in range(4):
            await client.generate(PAYLOAD, base_url=one.url)
    assert len(one.requests) == 4
    assert len(two.requests) == 4


async def test_an_engine_that_answers_several_requests_badly_gets_no_more_and_is_reported(router, engines):
    one, two = engines
    one.faults.extend(["garbage"] * 9)
    async with client_of(router) as client:
        for _ in range(3):
            await client.generate(PAYLOAD, base_url=one.url)
        assert list(client.reissues.suspects) == [one.url]
        assert "not an engine" in client.reissues.suspects[one.url]
        assert await client.healthy_worker_urls() == [two.url]
        router.faults.append("garbage")
        await client.generate(PAYLOAD)
    assert len(one.requests) == 3


async def test_a_request_that_every_engine_fails_on_accuses_nobody(router, engines):
    for engine in (*engines, router):
        engine.faults.extend([500] * 9)
    async with EngineClient(
        router.url, timeouts=ClientTimeouts(request_seconds=5.0, max_retries=7), reissues=Reissues()
    ) as client:
        with pytest.raises(EngineError, match=r"in 8 attempts.*HTTP 500"):
            await client.generate(PAYLOAD)
        assert not client.reissues.suspects


async def test_a_busy_engine_is_no_suspect(router, engines):
    one, _ = engines
    one.faults.extend([503, 429] * 3)
    async with client_of(router) as client:
        for _ in range(6):
            await client.generate(PAYLOAD, base_url=one.url)
        assert not client.reissues.suspects


async def test_a_good_answer_clears_an_engine(router, engines):
    one, _ = engines
    async with client_of(router) as client:
        for _ in range(3):
            one.faults.extend(["garbage"] * 2)
            for _ in range(3):
                await client.generate(PAYLOAD, base_url=one.url)
        assert not client.reissues.suspects


async def test_a_wait_for_what_is_replaced_is_bounded_by_time_alone(router):
    router.workers = []  # no engine at all, for a while
    router.faults.extend(["unreachable"] * 8)  # max_retries is 1
    async with client_of(router) as client:
        assert len((await client.generate(PAYLOAD))["output_ids"]) == 3
    assert len(router.requests) == 9


async def test_a_dead_router_is_waited_for_and_its_engines_serve_meanwhile(engines):
    with ExitStack() as stack:
        router = stack.enter_context(FakeEngine(workers=[engine.url for engine in engines]))
        async with client_of(router) as client:
            await client.healthy_worker_urls()
            stack.close()
            replies = await asyncio.gather(*(client.generate(PAYLOAD) for _ in range(4)))
    assert [len(reply["output_ids"]) for reply in replies] == [3] * 4
    assert [len(engine.requests) for engine in engines] == [2, 2]


async def test_engines_that_were_known_are_used_while_the_router_lists_none(router, engines, monkeypatch):
    monkeypatch.setattr(workers, "KEEP_SECONDS", 0.0)
    urls = sorted(engine.url for engine in engines)
    async with client_of(router) as client:
        assert await client.healthy_worker_urls() == urls
        router.workers.clear()
        assert await client.healthy_worker_urls() == urls
    async with EngineClient(router.url, timeouts=BOUNDS) as client:
        with pytest.raises(EngineError, match="knows no healthy engine"):
            await client.healthy_worker_urls()


async def test_a_refusal_is_not_issued_again(router, engines):
    router.faults.append(400)
    async with client_of(router) as client:
        with pytest.raises(EngineError, match="HTTP 400"):
            await client.generate(PAYLOAD)
    assert not [request for engine in engines for request in engine.requests]


async def test_other_servers_get_the_usual_number_of_attempts(router, engines):
    with FakeEngine() as judge:
        url = judge.url
    async with client_of(router) as client:
        with pytest.raises(TimeoutError, match="2 attempts"):
            await client.post(f"{url}/grade", {})


@pytest.mark.parametrize("fault", ["columns", "no meta", "half", 500])
async def test_a_sample_holds_the_tokens_of_one_answer_only(model_path, router, engines, fault):
    router.faults.extend([fault] * 3)
    with open_context(model_path, router.url, use_fault_tolerance=True) as context:
        group = [Sample(prompt="abc", index=i, group_index=0) for i in range(4)]
        run = generate_and_rm_group(context.args, group, dict(context.sampling_params))
        samples = await asyncio.to_thread(context.run, run)
    assert [sample.status for sample in samples] == [Status.COMPLETED] * 4
    for sample in samples:
        sample.check_alignment()
        assert (sample.response_length, sample.reward is not None) == (3, True)
    assert context.client.reissues.count == 3


async def test_without_fault_tolerance_a_bad_answer_costs_its_sample(model_path):
    with FakeEngine(workers=[]) as engine:
        engine.faults.append("columns")
        with open_context(model_path, engine.url) as context:
            group = [Sample(prompt="abc", index=i, group_index=0) for i in range(2)]
            run = generate_and_rm_group(context.args, group, dict(context.sampling_params))
            samples = await asyncio.to_thread(context.run, run)
    assert sorted(sample.status.value for sample in samples) == ["completed", "failed"]
    assert len(engine.requests) == 2
