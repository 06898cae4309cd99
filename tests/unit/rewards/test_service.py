"""Dispatch, worker processes and user functions."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from slime.errors import ConfigError, PluginError
from slime.rewards import REWARDS, RM_TYPES, RewardService, async_rm, batched_async_rm
from slime.rewards.grade import Grade, RewardTimeoutError
from slime.rewards.pool import RewardPool
from slime.rewards.registry import GraderKind
from slime.rewards.service import INLINE_CHARS
from slime.worker_process import resolve
from tests.support.rewards import answered, reward_args

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_row_resolves(name: str) -> None:
    spec = REWARDS[name]
    for function in (spec.function, spec.boxed_function):
        if function:
            grade = resolve(function)("Answer: 7", "7", {})
            assert isinstance(grade, Grade)
            if spec.reward_keys:
                assert isinstance(grade.reward, dict)
                assert tuple(grade.reward) == spec.reward_keys
    assert (spec.kind is GraderKind.UNAVAILABLE) == bool(spec.unavailable_because)


def test_known_types() -> None:
    assert {"math", "deepscaler", "dapo", "f1", "gpqa", "random", "remote_rm", "ifbench", "boxed_f1"} <= RM_TYPES
    assert "boxed_ifbench" not in RM_TYPES


async def test_metadata_comes_before_the_flag() -> None:
    service = RewardService(reward_args(rm_type="dapo"))
    assert await service.score(answered(r"\boxed{7}", metadata={"rm_type": " math "})) == 1.0
    reward = await service.score(answered("Answer: 7"))
    assert isinstance(reward, dict)
    assert reward["score"] == 1.0
    await service.close()


@pytest.mark.parametrize(
    ("name", "response", "score"),
    [
        ("boxed_math", r"\boxed{7}", 1),
        ("boxed_deepscaler", r"\boxed{7}", 1),
        ("boxed_math", "7", 0),
        ("boxed_f1", r"the answer \boxed{seven cats}", 1),
        ("boxed_gpqa", r"A or B \boxed{C}", 1),
    ],
)
async def test_boxed(name: str, response: str, score: float) -> None:
    label = {"boxed_f1": "seven cats", "boxed_gpqa": "C"}.get(name, "7")
    service = RewardService(reward_args(rm_type=name))
    assert await service.score(answered(response, label)) == score
    await service.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (None, r"Rule-based RM type is not specified.*--rm-type.*deepscaler"),
        ("maths", r"'maths'.*known are dapo, deepscaler, f1, gpqa"),
        ("boxed_boxed_math", r"'boxed_boxed_math'"),
        ("ifbench", r"--rm-type ifbench is not available.*--custom-rm-path"),
    ],
)
async def test_unusable_types(name: str | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        await async_rm(reward_args(rm_type=name), answered("x"))
    assert isinstance(caught.value, NotImplementedError)


async def test_counts_and_single_warning(caplog: pytest.LogCaptureFixture) -> None:
    service = RewardService(reward_args(rm_type="deepscaler"))
    for response in (r"\boxed{7}", r"\boxed{7}", r"</think>\boxed{7}"):
        await service.score(answered(response))
    assert caplog.text.count("use --rm-type math") == 1
    assert service.drain_metrics() == {
        "rollout/reward/graded": 3,
        "rollout/reward/unparsed": 2,
        "rollout/reward/timeouts": 0,
        "rollout/reward/failures": 0,
    }
    assert set(service.drain_metrics().values()) == {0}
    await service.close()


async def test_algebra_runs_in_a_worker_that_stays_warm() -> None:
    service = RewardService(reward_args(rm_type="math", rm_workers=1))
    assert await service.score(answered(r"\boxed{2\sqrt3}", r"\sqrt{12}")) == 1.0
    assert service._pool is not None
    before = service._pool.pids
    assert await service.score(answered(r"\boxed{x+1}", "x+2")) == 0.0
    assert service._pool.pids == before
    assert len(before) == 1
    await service.close()


async def test_plain_answers_start_no_worker() -> None:
    service = RewardService(reward_args(rm_type="math"))
    await asyncio.gather(*(service.score(answered(rf"\boxed{{{i}}}")) for i in range(50)))
    assert service._pool is None
    await service.close()


@pytest.mark.parametrize(
    ("name", "response", "score"),
    [
        ("math", r"{}\boxed{{7}}", 1),
        ("deepscaler", r"{}</think>\boxed{{8}}", 0),
        ("boxed_math", r"{}\boxed{{7}}", 1),
        ("dapo", "{} Answer: 7", {"score": 1.0, "acc": True, "pred": "7"}),
    ],
)
async def test_long_responses_are_graded_in_a_worker(name: str, response: str, score: Any) -> None:
    service = RewardService(reward_args(rm_type=name, rm_workers=1))
    assert await service.score(answered(response.format("x" * INLINE_CHARS))) == score
    assert service._pool is not None
    assert len(service._pool.pids) == 1
    await service.close()


@pytest.mark.parametrize("name", ["math", "deepscaler", "dapo", "boxed_math", "boxed_dapo"])
@pytest.mark.parametrize("pattern", ["{", "\\", "a ", "\\frac", "1,", "\\text{", "Answer:", "\\boxed{"])
async def test_hostile_responses_do_not_hold_the_event_loop(name: str, pattern: str) -> None:
    service = RewardService(reward_args(rm_type=name))
    body = (pattern * INLINE_CHARS)[: INLINE_CHARS - 40]
    for response in (f"Answer: </think>{body}", f"</think>\\boxed{{{body}}}", f"</think>\\boxed{{{body[:1900]}}}"):
        seconds: list[float] = []
        for _ in range(3):
            start = time.thread_time()
            await service.score(answered(response, "9" * 1900))
            seconds.append(time.thread_time() - start)
        assert min(seconds) < 0.01  # 2 ms on an idle machine
    await service.close()


async def test_hung_grader_is_killed_and_replaced() -> None:
    pool = RewardPool(num_workers=1, timeout_seconds=0.2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    start = time.monotonic()
    with pytest.raises(RewardTimeoutError, match=r"no answer from time:sleep within 0\.2 s"):
        await pool.call("time:sleep", (60,), otherwise=0)
    assert time.monotonic() - start < 5
    assert ticks > 10  # the event loop went on
    assert await pool.call("math:sqrt", (4,), otherwise=0) == 2
    assert await pool.call("os:_exit", (3,), otherwise="died") == "died"
    assert pool.num_failures == 1
    ticking.cancel()
    pool.close()
    assert pool.pids == set()


CUSTOM = """
import asyncio, threading, time

async def coroutine(args, sample, **kw):
    return 1.5 if kw.get("evaluation") else len(sample.response)

def plain(args, sample):
    assert threading.current_thread() is not threading.main_thread()
    return {"score": len(sample.response)}

async def group(args, samples):
    return [float(i) for i, _ in enumerate(samples)]

async def short(args, samples):
    return [1.0]

async def nothing(args, sample):
    return None

def broken(args, sample):
    raise RuntimeError("judge is gone")

class CustomRewardModel:
    built = 0
    def __init__(self, model_path):
        type(self).built += 1
        assert type(self).built == 1 and threading.current_thread() is not threading.main_thread()
        self.model_path = model_path
        self.calls = []

    def compute_reward(self, prompts, responses):
        time.sleep(0.05)
        self.calls.append(len(responses))
        if "bad" in responses:
            return [1.0]
        if "where" in responses:
            return [self.model_path == "/models/judge" for _ in responses]
        if "calls" in responses:
            return [len(self.calls)] * len(responses)
        return [len(p) + len(r) for p, r in zip(prompts, responses)]

class Wrong:
    def __init__(self, model_path): ...
"""


@pytest.fixture
def custom(tmp_path: Path) -> str:
    file = tmp_path / "custom_rm.py"
    file.write_text(CUSTOM)
    return str(file)


async def test_functions(custom: str) -> None:
    args = reward_args(custom_rm_path=f"{custom}:coroutine", rm_type="math")
    assert await async_rm(args, answered("abc")) == 3
    assert await async_rm(args, answered("abc"), evaluation=True) == 1.5
    own = answered("abcd", custom_rm_path=f"{custom}:plain")
    assert await async_rm(args, own) == {"score": 4}
    assert await batched_async_rm(args, []) == []


async def test_group_functions_are_called_once(custom: str) -> None:
    samples = [answered("a", custom_rm_path=f"{custom}:plain"), answered("b")]
    assert await batched_async_rm(reward_args(custom_rm_path=f"{custom}:group"), samples) == [0.0, 1.0]
    built_in = reward_args(rm_type="math")
    assert await batched_async_rm(built_in, [answered(r"\boxed{7}"), answered("7")]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("nothing", PluginError, "a reward is a number or a dict of its parts, found NoneType"),
        ("broken", RuntimeError, "judge is gone"),
        ("missing", PluginError, "--custom-rm-path"),
        ("Wrong", PluginError, r"class Wrong needs compute_reward\(prompts, responses\)"),
    ],
)
async def test_broken_functions(custom: str, name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        await async_rm(reward_args(custom_rm_path=f"{custom}:{name}"), answered("abc"))


async def test_group_answer_of_the_wrong_length(custom: str) -> None:
    with pytest.raises(PluginError, match=r"list of 2 samples.*found 1 rewards"):
        await batched_async_rm(reward_args(custom_rm_path=f"{custom}:short"), [answered("a"), answered("b")])


async def test_reward_model_class(custom: str) -> None:
    args = reward_args(custom_rm_path=custom, custom_rm_model_path="/models/judge")
    service = RewardService(args)
    assert await service.score(answered("where")) == 1
    rewards = await asyncio.gather(*(service.score(answered("r" * i)) for i in range(20)))
    assert rewards == [1 + i for i in range(20)]
    calls = await service.score(answered("calls"))
    assert isinstance(calls, int)
    assert calls <= 4  # one, a first of the twenty, the rest of them, this one
    assert await service.score_group([answered("ab"), answered("")]) == [3, 1]
    with pytest.raises(PluginError, match="got 2 prompts and returned 1 rewards"):
        await service.score_group([answered("bad"), answered("b")])
    await service.close()


async def test_functions_of_the_user_reach_the_active_service() -> None:
    service = RewardService(reward_args(rm_type="math"))
    with service.activate():
        task = asyncio.create_task(async_rm(reward_args(rm_type="f1"), answered("7")))
        assert await task == 0.0  # graded by the active service: no box
    assert service.drain_metrics()["rollout/reward/unparsed"] == 1
    assert await async_rm(reward_args(rm_type="f1", rm_workers=1), answered("7")) == 1.0
    await service.close()
