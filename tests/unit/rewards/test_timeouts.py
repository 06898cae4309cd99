"""``--rm-timeout``: reward 0, counted, whatever grades; and nothing that hangs keeps others waiting."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from slime.errors import PluginError, WaitTimeoutError
from slime.rewards import RewardService, custom
from slime.rewards.grade import RewardTimeoutError
from slime.rewards.registry import REWARDS, GraderKind, GraderSpec
from slime.rewards.threads import CallThreads
from tests.support.rewards import RewardServer, answered, reward_args

pytestmark = pytest.mark.timeout(60)

LIMIT = 0.15

CODE = """
import asyncio, functools, threading, time

release = threading.Event()

async def coroutine(args, sample):
    if sample.response == "slow":
        await asyncio.sleep(60)
    return 1.0

async def stubborn(args, sample):
    while sample.response == "slow":
        try:
            await asyncio.sleep(0.2 if release.is_set() else 60)
            return 1.0
        except asyncio.CancelledError:
            release.set()
    return 1.0

def plain(args, sample):
    if sample.response == "slow":
        release.wait(60)
    return 1.0

def gives_coroutine(args, sample):
    return coroutine(args, sample)

async def group(args, samples):
    await asyncio.sleep(60 if any(s.response == "slow" for s in samples) else 0)
    return [1.0 for _ in samples]

def own_time_out(args, sample):
    raise TimeoutError("the judge was slow")

def leaves(args, sample):
    raise SystemExit(3)

def ends_an_iterator(args, sample):
    return next(iter([]))

class CustomRewardModel:
    def __init__(self, path):
        time.sleep(0.3)  # longer than the limit: not counted
    def compute_reward(self, prompts, responses):
        if "slow" in responses:
            release.wait(60)
        return [1.0 for _ in responses]
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "judges.py"
    file.write_text(CODE)
    return str(file)


async def release(service: RewardService) -> None:
    """Let the threads of given-up calls end, and close."""
    for reward in service._custom.values():
        function = getattr(reward, "_function", None) or reward._cls.compute_reward  # type: ignore[attr-defined]
        function.__globals__["release"].set()
    await service.close()


@pytest.mark.parametrize("name", ["coroutine", "stubborn", "plain", "gives_coroutine", "CustomRewardModel"])
async def test_every_kind_of_custom_reward(code: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    service = RewardService(reward_args(custom_rm_path=f"{code}:{name}", rm_timeout=LIMIT))
    start = time.monotonic()
    assert await service.score(answered("slow")) == 0.0
    assert time.monotonic() - start < 3
    assert await service.score(answered("quick")) == 1.0
    assert "reward 0 (--rm-timeout): the rollout waited 0.15 s for" in caplog.text
    assert name in caplog.text or name == "CustomRewardModel"
    metrics = service.drain_metrics()
    assert (metrics["rollout/reward/timeouts"], metrics["rollout/reward/graded"]) == (1, 2)
    assert service.drain_metrics()["rollout/reward/timeouts"] == 0
    await release(service)


async def test_remote_reward() -> None:
    handler = RewardServer([298])
    async with await handler.start() as server:
        args = reward_args(rm_type="remote_rm", rm_url=str(server.make_url("/score")), rm_timeout=LIMIT)
        service = RewardService(args)
        assert await service.score(answered("r")) == 0.0
        assert await service.score(answered("r")) == 0.75
        assert service.drain_metrics()["rollout/reward/timeouts"] == 1
        await service.close()


async def test_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = GraderSpec(kind=GraderKind.POOL, about="", function="tests.support.rewards:hang")
    monkeypatch.setitem(REWARDS, "math", hanging)
    service = RewardService(reward_args(rm_type="math", rm_timeout=LIMIT, rm_workers=1))
    assert await service.score(answered("x")) == 0.0
    assert service.drain_metrics()["rollout/reward/timeouts"] == 1
    await service.close()


async def test_a_group_call_costs_all_its_samples(code: str) -> None:
    args = reward_args(custom_rm_path=f"{code}:group", rm_timeout=LIMIT, reward_key="score", eval_reward_key="acc")
    service = RewardService(args)
    zero = {"score": 0.0, "acc": 0.0}
    rewards = await service.score_group([answered("quick"), answered("slow")])
    assert rewards == [zero, zero]
    assert rewards[0] is not rewards[1]
    assert await service.score_group([answered("quick")] * 2) == [1.0, 1.0]
    assert service.drain_metrics()["rollout/reward/timeouts"] == 2
    await service.close()


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("own_time_out", TimeoutError, "the judge was slow"),
        ("leaves", RuntimeError, "SystemExit"),
        ("ends_an_iterator", RuntimeError, "StopIteration"),
    ],
)
async def test_what_a_function_raises_is_its_own(code: str, name: str, error: type[Exception], text: str) -> None:
    service = RewardService(reward_args(custom_rm_path=f"{code}:{name}"))
    with pytest.raises(error, match=text) as caught:
        await service.score(answered("x"))
    assert not isinstance(caught.value, WaitTimeoutError)
    assert service.drain_metrics()["rollout/reward/timeouts"] == 0
    await service.close()


async def test_hanging_calls_do_not_starve_later_ones_until_there_are_too_many(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "NUM_THREADS", 2)
    monkeypatch.setattr(custom, "MAX_ABANDONED", 4)
    service = RewardService(reward_args(custom_rm_path=f"{code}:plain", rm_timeout=LIMIT))
    samples = [answered("slow") for _ in range(4)] + [answered("quick") for _ in range(6)]
    assert await asyncio.gather(*(service.score(s) for s in samples)) == [0.0] * 4 + [1.0] * 6
    assert await service.score(answered("slow")) == 0.0
    with pytest.raises(PluginError, match=r"5 calls of the reward function .*py:plain .*--rm-timeout.*at most 4"):
        await service.score(answered("quick"))
    await release(service)


async def test_the_wait_for_a_thread_is_not_counted() -> None:
    threads = CallThreads("f", num_threads=1, max_abandoned=1)
    results: list[Any] = await asyncio.gather(
        *(threads.run(lambda: time.sleep(0.1), timeout_seconds=0.3) for _ in range(5))
    )
    assert results == [None] * 5
    threads.close()


def until_back(threads: CallThreads) -> None:
    """Wait until no given-up call runs; the test's time-out bounds it."""
    while threads.num_abandoned:
        time.sleep(0.01)


async def test_threads_come_back_from_given_up_calls() -> None:
    threads = CallThreads("f", num_threads=1, max_abandoned=1)
    with pytest.raises(RewardTimeoutError, match=r"waited 0\.05 s for f"):
        await threads.run(lambda: time.sleep(0.2), timeout_seconds=0.05)
    cancelled = asyncio.create_task(threads.run(lambda: time.sleep(0.2), timeout_seconds=5))
    await asyncio.sleep(0.02)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert threads.num_abandoned == 2
    await asyncio.to_thread(until_back, threads)
    assert await threads.run(lambda: 7, timeout_seconds=5) == 7
    threads.close()
    with pytest.raises(PluginError, match="closed"):
        threads.submit(lambda _: 7)
