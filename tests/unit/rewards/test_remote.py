"""The remote reward model: what is sent, what is tried again, and how long."""

import asyncio
import time

import pytest

from slime.errors import ConfigError, EngineError
from slime.rewards import async_rm
from slime.rewards import remote as remote_module
from slime.rewards.grade import RewardTimeoutError
from slime.rewards.remote import RemoteReward
from slime.rewards.service import remote_rm
from tests.support.rewards import RewardServer, answered, reward_args

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_FIRST_PAUSE_SECONDS", 0.01)


async def test_payload_and_retries() -> None:
    handler = RewardServer([503, 429])
    async with await handler.start() as server:
        remote = RemoteReward(str(server.make_url("/score")), timeout_seconds=5)
        assert await remote.score(answered("r"), "r") == 0.75
        await remote.close()
    assert handler.payloads == [{"prompt": "p", "response": "r", "label": "7"}] * 3


@pytest.mark.parametrize(("status", "text"), [(400, "answered 400: because"), (299, "not answer with JSON")])
async def test_a_refusal_is_raised_at_once(status: int, text: str) -> None:
    handler = RewardServer([status])
    async with await handler.start() as server:
        remote = RemoteReward(str(server.make_url("/score")), timeout_seconds=5)
        with pytest.raises(EngineError, match=text):
            await remote.score(answered("r"), "r")
        await remote.close()
    assert len(handler.payloads) == 1


async def test_all_tries_together_are_bounded() -> None:
    handler = RewardServer([500] * 1000)
    async with await handler.start() as server:
        remote = RemoteReward(str(server.make_url("/score")), timeout_seconds=0.2)
        start = time.monotonic()
        with pytest.raises(EngineError, match="answered 500: because"):
            await remote.score(answered("r"), "r")
        assert time.monotonic() - start < 2
        await remote.close()
    assert len(handler.payloads) > 1


async def test_the_wait_for_a_connection_is_not_counted() -> None:
    handler = RewardServer([297] * 4)  # 0.1 s each, one after the other
    async with await handler.start() as server:
        remote = RemoteReward(str(server.make_url("/score")), timeout_seconds=0.25, num_connections=1)
        rewards = await asyncio.gather(*(remote.score(answered("r"), "r") for _ in range(4)))
        assert rewards == [0.75] * 4
        handler.statuses = [298]
        with pytest.raises(RewardTimeoutError, match=r"waited 0.25 s for the reward model at --rm-url http"):
            await remote.score(answered("r"), "r")
        await remote.close()


async def test_by_name() -> None:
    handler = RewardServer([])
    async with await handler.start() as server:
        args = reward_args(rm_type="boxed_remote_rm", rm_url=str(server.make_url("/score")))
        assert await async_rm(args, answered(r"so \boxed{x}")) == 0.75
        assert await remote_rm(args, answered("y")) == 0.75
    assert [payload["response"] for payload in handler.payloads] == ["x", "y"]
    with pytest.raises(ConfigError, match=r"--rm-url URL"):
        await async_rm(reward_args(rm_type="remote_rm"), answered("x"))


async def test_without_a_server() -> None:
    remote = RemoteReward("http://127.0.0.1:9/score", timeout_seconds=0.1)
    with pytest.raises(EngineError, match="cannot be reached"):
        await remote.score(answered("r"), "r")
    await remote.close()
