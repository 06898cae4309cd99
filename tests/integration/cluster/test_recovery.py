"""Engines and routers that die or freeze in the middle of requests, with real processes."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter

import psutil
import pytest

from slime.cluster.ray_session import guarded_processes, ray_session
from slime.cluster.recovery import Recovery
from slime.cluster.registration import workers
from slime.config import ClusterConfig, Config, DebugConfig, EngineConfig, RolloutConfig, TrainConfig
from slime.errors import EngineError
from slime.rollout.client import ClientTimeouts, EngineClient
from slime.rollout.reissue import Reissues
from tests.support.engine_groups import running_engines
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

NUM_REQUESTS, NUM_TOKENS = 32, 400


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def engines(model, tmp_path_factory):
    with (
        guarded_processes() as guardian,
        ray_session("cpu", 2, guardian.scratch_dir),
        running_engines(configure(model), tmp_path_factory.mktemp("logs")) as group,
    ):
        yield group


def configure(model, *, replaces=True):
    return Config(
        cluster=ClusterConfig(
            device="cpu",
            rollout_num_gpus=2,
            use_fault_tolerance=replaces,
            rollout_health_check_interval=0.5,
            rollout_health_check_timeout=1.0,
        ),
        train=TrainConfig(precision="fp32"),
        rollout=RolloutConfig(hf_checkpoint=str(model)),
        engine=EngineConfig(engine_start_timeout_seconds=60, rollout_backend="embedded"),
        debug=DebugConfig(debug_rollout_only=True),
    )


@contextlib.contextmanager
def watching(model, engines, *, weights_wait=False, suspects=dict, replaces=True):
    """A recovery at work, with what the driver does while it waits for a rollout: check once in a while."""
    recovery = Recovery(configure(model, replaces=replaces), engines, suspects, weights_wait=weights_wait)
    over, errors = threading.Event(), []

    def check():
        while not over.wait(0.2):
            try:
                recovery.check()
            except EngineError as error:
                errors.append(error)
                return

    thread = threading.Thread(target=check)
    recovery.watch()
    thread.start()
    try:
        yield recovery, errors
    finally:
        over.set()
        thread.join(30)
        recovery.close()


def pid_of(url):
    port = int(url.rpartition(":")[2])
    for connection in psutil.net_connections("tcp4"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise AssertionError(f"no process for {url}")


def listed(engines):
    return {worker["url"] for worker in workers(engines.router_url, 5.0)}


def wait_for(condition, seconds=40.0):
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.1)


async def generate_while(engines, hurt):
    """Answers to many requests, of which ``hurt`` disturbs the service when they are under way."""
    timeouts = ClientTimeouts(request_seconds=60.0, control_seconds=5.0)
    reissues = Reissues()
    async with EngineClient(engines.router_url, timeouts=timeouts, reissues=reissues) as client:
        await client.healthy_worker_urls()
        jobs = [
            asyncio.create_task(
                client.generate(
                    {
                        "input_ids": [65, 66 + i],
                        "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0},
                    }
                )
            )
            for i in range(NUM_REQUESTS)
        ]
        await asyncio.sleep(0.4)
        hurt()
        replies = await asyncio.wait_for(asyncio.gather(*jobs), 60)
    return replies, reissues.count


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_of_a_lost_engine_are_answered_by_another_and_it_comes_back(model, engines, signum):
    victim, other = engines.urls
    with watching(model, engines) as (recovery, errors):
        replies, _ = await generate_while(engines, lambda: os.kill(pid_of(victim), signum))
        assert Counter(len(reply["output_ids"]) for reply in replies) == {NUM_TOKENS: NUM_REQUESTS}
        wait_for(lambda: victim not in engines.urls and listed(engines) == set(engines.urls))
        assert recovery.rollout_complete() == {"rollout/engine_restarts": 1.0}
        assert recovery.rollout_complete() == {"rollout/engine_restarts": 0.0}
    assert not errors
    assert engines.urls[1] == other
    engines.check()
    with pytest.raises(AssertionError, match="no process"):
        pid_of(victim)


async def test_a_router_comes_back_at_its_address_with_its_engines(model, engines):
    address = engines.router_url
    with watching(model, engines) as (recovery, errors):
        replies, count = await generate_while(engines, lambda: os.kill(pid_of(address), signal.SIGKILL))
        assert Counter(len(reply["output_ids"]) for reply in replies) == {NUM_TOKENS: NUM_REQUESTS}
        assert count > 0  # those that were in flight
        wait_for(lambda: not recovery.look())
    assert not errors
    assert engines.router_url == address
    assert listed(engines) == set(engines.urls)


def test_a_new_engine_gets_no_request_before_it_has_weights(model, engines):
    victim, other = engines.urls
    with watching(model, engines, weights_wait=True) as (recovery, errors):
        os.kill(pid_of(victim), signal.SIGKILL)
        wait_for(lambda: victim not in listed(engines))
        recovery.settle()  # before the weights are sent
        assert victim not in engines.urls
        assert listed(engines) == {other}
        recovery.serve()
        assert listed(engines) == set(engines.urls)
    assert not errors


def test_an_engine_that_answers_badly_is_replaced_while_another_answers_well(model, engines):
    liar = engines.urls[0]
    with watching(model, engines, suspects=lambda: {liar: "half of an answer"}) as (recovery, errors):
        wait_for(lambda: liar not in engines.urls and listed(engines) == set(engines.urls))
        assert recovery.rollout_complete() == {"rollout/engine_restarts": 1.0}
    with watching(model, engines, suspects=lambda: dict.fromkeys(engines.urls, "nonsense")) as (recovery, errors):
        time.sleep(1.0)
        assert recovery.summary() is None
    assert not errors


def test_without_fault_tolerance_a_frozen_engine_ends_the_run(model, engines):
    victim = engines.urls[0]
    with watching(model, engines, replaces=False) as (recovery, errors):
        pid = pid_of(victim)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: errors, seconds=20)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert recovery.summary() is None
    assert "engine 0 failed its health checks" in str(errors[0])


def test_no_engine_left_is_an_error_at_once(model, engines):
    with watching(model, engines, weights_wait=True) as (recovery, errors):
        started = time.monotonic()
        for url in engines.urls:
            os.kill(pid_of(url), signal.SIGKILL)
        wait_for(lambda: errors)
        assert time.monotonic() - started < 15
        recovery.settle()
    assert "no engine is left" in str(errors[0])
    assert "SIGKILL" in str(errors[0])


def test_with_no_engine_left_new_ones_get_weights_if_the_trainer_is_free(model, engines):
    recovery = Recovery(configure(model), engines, dict, weights_wait=True)
    brought = []

    def bring_weights():
        recovery.settle()
        brought.append(list(engines.urls))
        assert not listed(engines)
        recovery.serve()
        recovery.watch()

    recovery.bring_weights_with(bring_weights)
    recovery.watch()
    try:
        before = list(engines.urls)
        for url in before:
            os.kill(pid_of(url), signal.SIGKILL)

        def came_back():
            recovery.check()
            return bool(brought)

        wait_for(came_back)
        assert not set(before) & set(engines.urls)
        assert listed(engines) == set(engines.urls)
        recovery.check()
        assert len(brought) == 1
    finally:
        recovery.close()


def test_an_engine_that_cannot_start_again_is_named_with_the_end_of_its_log(model, engines):
    config = model / "config.json"
    text = config.read_text()
    with watching(model, engines) as (_, errors):
        config.write_text("{}")
        try:
            os.kill(pid_of(engines.urls[1]), signal.SIGKILL)
            wait_for(lambda: errors)
        finally:
            config.write_text(text)
    assert "engine 1 failed 4 times without serving a whole rollout" in str(errors[0])
    assert "ForCausalLM" in str(errors[0])  # what it said in its log of the model it found
