"""The teacher's replies: what is asked, what becomes of the answer, and every way in which it can be wrong."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func

from slime.data.batch import build_rollout_batch
from slime.errors import ConfigError, DataError, EngineError
from slime.types import Sample, Status
from tests.support.rollout_args import make_args

POST_PROCESS = "slime.rollout.on_policy_distillation.post_process_rewards"


def reply(tokens: list[int], first: int = 0) -> dict[str, Any]:
    """Log-prob -id for every token but the first."""
    triples = [[None if i == 0 else -float(t), t, None] for i, t in enumerate(tokens)]
    return {"text": "", "meta_info": {"input_token_logprobs": triples[first:]}}


def sample(index: int = 0, tokens: tuple[int, ...] = (7, 8, 1, 2, 3), **fields: Any) -> Sample:
    made = Sample(index=index, group_index=fields.pop("group_index", 0), tokens=list(tokens), response_length=3)
    made.status = Status.COMPLETED
    made.reward = reply(made.tokens)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def args(model_path: Path) -> Any:
    return make_args(
        model_path,
        "http://127.0.0.1:1",
        rm_url="http://127.0.0.1:1/generate",
        custom_reward_post_process_path=POST_PROCESS,
    )


def test_the_responses_log_probs_reach_the_batch(args: Any) -> None:
    batch = build_rollout_batch(args, 0, [[sample(0), sample(1, (9, 4, 5, 6))]])
    assert batch.teacher_log_probs is not None
    assert [row.tolist() for row in batch.teacher_log_probs] == [[-1, -2, -3], [-4, -5, -6]]
    assert (batch.rewards, batch.raw_rewards) == ([0.0, 0.0], [0.0, 0.0])


def test_only_the_end_of_the_prompt_may_be_scored(args: Any) -> None:
    one = sample(reward=reply([7, 8, 1, 2, 3], first=1))
    post_process_rewards(args, [one])
    assert one.teacher_log_probs == [-1, -2, -3]


def test_a_task_reward_is_compared_within_its_group(model_path: Path) -> None:
    args = make_args(model_path, "http://127.0.0.1:1", reward_key="score")
    samples = [sample(i, group_index=i // 2) for i in range(4)]
    for one, score in zip(samples, (1.0, 0.0, 3.0, 3.0), strict=True):
        one.reward = {**reply(one.tokens), "score": score}
    raw, rewards = post_process_rewards(args, samples)
    assert raw == [1.0, 0.0, 3.0, 3.0]
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert rewards == pytest.approx([half, -half, 0.0, 0.0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"error": "busy", "meta_info": {}}, "no meta_info.input_token_logprobs"),
        (reply([7, 8, 1, 2, 3], first=3), "log-probs of 1 tokens, and the response alone has 3"),
        (reply([7, 8, 1, 2, 4]), "about other tokens"),
        (
            {"meta_info": {"input_token_logprobs": [[None, t, None] for t in (7, 8, 1, 2, 3)]}},
            "None for response token 0",
        ),
    ],
)
def test_a_reply_that_does_not_fit_is_an_error(args: Any, answer: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match="sample 4: the teacher") as caught:
        post_process_rewards(args, [sample(4, reward=answer)])
    assert words in str(caught.value)


def test_a_masked_token_needs_no_log_prob(args: Any) -> None:
    one = sample(loss_mask=[1, 0, 1])
    one.reward["meta_info"]["input_token_logprobs"][3][0] = None
    post_process_rewards(args, [one])
    assert one.teacher_log_probs == [-1, 0, -3]


def test_samples_without_a_reply_are_not_trained(args: Any, caplog: pytest.LogCaptureFixture) -> None:
    late, failed = sample(1, reward=0.0), sample(2, status=Status.FAILED, reward=0.0, remove_sample=True)
    batch = build_rollout_batch(args, 0, [[sample(0), late, failed]])
    assert [mask.sum() for mask in batch.loss_masks] == [3, 0, 0]
    assert "2 of 3 samples have no reply" in caplog.text
    with pytest.raises(DataError, match=r"none of 1 samples has a reply.*--rm-timeout 30"):
        post_process_rewards(args, [sample(0, reward=0.0)])


class Teacher:
    """A server that answers with what it is given, one entry per request, and keeps the requests."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.Response(status=answer, text="no") if isinstance(answer, int) else web.json_response(answer)

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/generate", self.handle)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/generate"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


async def test_what_is_asked(model_path: Path) -> None:
    teacher = Teacher(503, reply([7, 8, 1, 2, 3]))
    async with teacher as url:
        args = make_args(model_path, url, rm_url=url, rollout_temperature=0.7)
        assert await reward_func(args, sample()) == reply([7, 8, 1, 2, 3])
    assert len(teacher.bodies) == 2  # the first answer was a passing fault
    assert teacher.bodies[1] == {
        "input_ids": [7, 8, 1, 2, 3],
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


async def test_what_the_teacher_refuses_is_raised_at_once(model_path: Path) -> None:
    async with Teacher(400) as url:
        args = make_args(model_path, url, rm_url=url)
        started = time.monotonic()
        with pytest.raises(EngineError, match="400"):
            await asyncio.wait_for(reward_func(args, sample()), 10)
        assert time.monotonic() - started < 2
    with pytest.raises(ConfigError, match="--rm-url"):
        await reward_func(make_args(model_path, url), sample())


async def test_an_answer_that_is_no_object_is_an_error(model_path: Path) -> None:
    async with Teacher([1, 2]) as url:
        with pytest.raises(DataError, match=r"expected the reply of POST /generate"):
            await reward_func(make_args(model_path, url, rm_url=url), sample())
