"""New weights while a rollout generates, at an engine that aborts for them."""

from __future__ import annotations

import asyncio

import pytest

from slime.rollout.generate import generate_and_rm
from slime.rollout.offpolicy import mask_earlier_tokens, mask_older_tokens
from slime.types import Sample, Status
from slime.version_spans import VersionSpan
from tests.support.fake_engine import Answer, FakeEngine
from tests.support.pipeline import rollout, write_plugin
from tests.support.rollout_args import ListSource, open_context

LONG = 30.0


def switching(engine: FakeEngine, cuts: int, length: int = 6) -> None:
    """Answer with the next tokens of 65, 66, ...; the first ``cuts`` requests are interrupted by new weights."""
    prompts: list[int] = []

    def answer(input_ids: list[int], params: dict[str, int]) -> Answer:
        prompts.append(len(input_ids))
        done = len(input_ids) - prompts[0]
        engine.latency_seconds = LONG if len(prompts) <= cuts else 0.0
        if engine.latency_seconds:
            engine.switch(str(len(prompts) + 1), after_seconds=0.05)
        count = min(length - done, params["max_new_tokens"])
        ids = [65 + done + i for i in range(count)]
        return Answer(ids, "".join(map(chr, ids)), {"type": "length", "length": count})

    engine.answer = answer


def test_an_interrupted_response_goes_on_with_the_new_weights(model_path):
    with FakeEngine(sampling_masks=True, routes=(2, 2)) as engine:
        flags = {
            "rollout_top_p": 0.9, "use_rollout_routing_replay": True,
            "custom": {"num_layers": 2, "moe_router_topk": 2},
            "n_samples_per_prompt": 1, "rollout_batch_size": 1, "rollout_max_response_len": 6,
        }  # fmt: skip
        switching(engine, cuts=2)
        engine.workers = [engine.url]
        with open_context(model_path, engine.url, **flags) as context:
            sample = rollout(context, ListSource(["ab"], 1)).samples[0][0]
            prompt = context.tokenizer.encode("ab")
            text = context.tokenizer.decode(range(65, 71))
    assert isinstance(sample, Sample)
    assert sample.tokens == [*prompt, 65, 66, 67, 68, 69, 70]
    assert sample.response == text
    assert sample.status is Status.TRUNCATED
    assert sample.weight_version_spans == [VersionSpan("1", 0, 1), VersionSpan("2", 1, 2), VersionSpan("3", 2, 6)]
    assert sample.weight_versions == ["1", "2", "3"]
    assert sample.rollout_log_probs == [-0.25, -0.25, -0.25, -0.26, -0.27, -0.28]
    assert sample.rollout_top_p_token_ids.tolist() == [i for t in range(65, 71) for i in (t, 7)]
    # Which request routed a token: those that ran it first.
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == list(range(len(prompt) + 5))
    assert sample.rollout_routed_experts[:, 0, 1].tolist() == [1] * len(prompt) + [2, 3, 3, 3, 3]
    budgets = [r["sampling_params"]["max_new_tokens"] for r in engine.requests]
    seeds = {r["sampling_params"]["sampling_seed"] for r in engine.requests}
    assert budgets == [6, 5, 4]
    assert len(seeds) == 3
    assert [r["routed_experts_start_len"] for r in engine.requests] == [0, len(prompt), len(prompt) + 1]
    assert sample.prefix_cache_info.total_prompt_tokens == len(prompt)


def test_a_given_seed_is_kept_for_the_first_part_only(model_path, engine):
    switching(engine, cuts=1)
    with open_context(model_path, engine.url) as context:
        params = {**context.sampling_params, "sampling_seed": 7, "max_new_tokens": 6}
        for _ in range(2):
            switching(engine, cuts=1)
            context.run(generate_and_rm(context.args, Sample(index=3, prompt="ab"), params))
    seeds = [r["sampling_params"]["sampling_seed"] for r in engine.requests]
    assert seeds[0] == seeds[2] == 7
    assert seeds[1] == seeds[3] != 7


def test_an_aborted_answer_without_log_probs_is_asked_for_again(model_path, engine):
    switching(engine, cuts=1)
    engine.bare_aborts = True
    flags = {"n_samples_per_prompt": 1, "rollout_batch_size": 1, "rollout_max_response_len": 6}
    with open_context(model_path, engine.url, **flags) as context:
        sample = rollout(context, ListSource(["ab"], 1)).samples[0][0]
    first, second = engine.requests
    assert first == second
    assert sample.weight_version_spans == spans(("2", 0, 6))
    assert len(sample.rollout_log_probs) == 6


def test_the_end_of_a_rollout_continues_nothing(model_path, engine):
    engine.answer = lambda ids, params: Answer([65, 66], "AB")
    engine.latency_seconds = LONG
    with open_context(model_path, engine.url) as context:

        async def ended() -> Sample:
            params = {**context.sampling_params, "max_new_tokens": 6}
            task = asyncio.ensure_future(generate_and_rm(context.args, Sample(prompt="ab"), params))
            await engine.until_running(1)
            context.turn.aborted = True
            engine.switch("2")
            return await task

        sample = context.run(ended())
    assert (sample.status, sample.response_length, len(engine.requests)) == (Status.ABORTED, 1, 1)
    assert sample.weight_version_spans == [VersionSpan("1", 0, 1)]


def test_turns_of_a_conversation_are_continued(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "async def talk(args, samples, evaluation=False):\n"
        "    sample = samples[0]\n"
        "    first = await generate_single(sample.prompt)\n"
        "    more = [*sample.prompt, {'role': 'assistant', 'content': first}, {'role': 'user', 'content': 'and'}]\n"
        "    sample.response = await generate_single(more)\n"
        "    return samples\n",
    )
    flags = {"custom_generate_function_path": f"{plugin}:talk", "n_samples_per_prompt": 1, "rollout_batch_size": 1}
    with open_context(model_path, engine.url, **flags) as context:
        asked = 0

        def answer(input_ids, params):
            nonlocal asked
            asked += 1
            engine.latency_seconds = LONG if asked == 2 else 0.0  # the second turn is interrupted
            if asked == 2:
                engine.switch("2", after_seconds=0.05)
            return Answer([64 + asked, 70 + asked], chr(65 + asked) + chr(71 + asked))

        engine.answer = answer
        sample = rollout(context, ListSource([[{"role": "user", "content": "hi"}]], 1)).samples[0][0]
    assert [(s.version, s.end - s.start) for s in sample.weight_version_spans] == [("1", 2), ("1", 1), ("2", 2)]
    trained = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
    assert trained == [65, 71, 66, 67, 73]
    versions = [s.version for s in sample.weight_version_spans for _ in range(s.start, s.end)]
    assert len(versions) == sum(sample.loss_mask)


POSTS = """
from slime.utils.http_utils import post

async def own(args, sample, sampling_params):
    sample.tokens = sample.tokens or [1, 2]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    left = sampling_params["max_new_tokens"] - sample.response_length
    reply = await post(url, {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": left}})
    rows = reply["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(args, tokens=[r[1] for r in rows], log_probs=[r[0] for r in rows],
                                  meta_info=reply["meta_info"], text=reply["text"])
    return sample
"""


@pytest.mark.parametrize("partial", [True, False])
def test_a_function_with_requests_of_its_own_is_called_again(model_path, engine, tmp_path, partial):
    plugin = write_plugin(tmp_path, POSTS)
    flags = {"custom_generate_function_path": f"{plugin}:own", "n_samples_per_prompt": 1, "rollout_batch_size": 1}
    with open_context(model_path, engine.url, partial_rollout=partial, **flags) as context:
        switching(engine, cuts=1)
        sample = rollout(context, ListSource(["ab"], 1)).samples[0][0]
    assert sample.status is Status.TRUNCATED
    assert sample.tokens == [1, 2, 65, 66, 67, 68, 69, 70]
    assert sample.weight_version_spans == (spans(("1", 0, 1), ("2", 1, 6)) if partial else spans(("2", 0, 6)))
    assert len(engine.requests) == 2


def test_a_sample_that_is_always_aborted_fails_alone(model_path, engine):
    engine.answer = lambda ids, params: Answer([], "", {"type": "abort", "message": "no", "status_code": None})
    flags = {"n_samples_per_prompt": 1, "rollout_batch_size": 1, "max_failed_sample_share": 1.0}
    with open_context(model_path, engine.url, **flags) as context:
        sample = rollout(context, ListSource(["ab"], 1)).samples[0][0]
    assert sample.status is Status.FAILED
    assert "aborted 8 times in vain while the rollout goes on" in sample.metadata["error"]["message"]


def spans(*rows: tuple[str, int, int]) -> list[VersionSpan]:
    return [VersionSpan(*row) for row in rows]


def test_tokens_before_the_switch_are_masked_and_those_of_the_newest_weights_are_not() -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1], status=Status.ABORTED)
    sample.weight_version_spans = spans(("1", 0, 1), ("2", 2, 3))
    earlier = mask_earlier_tokens(sample)
    assert sample.loss_mask == [0, 0, 0]
    sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3, 4, 5, 6], 5, [0, 0, 0, 1, 1]
    # Resumed before the weights changed again: token 2 is of the newest weights although it is from a rollout ago.
    sample.weight_version_spans = spans(("1", 0, 1), ("2", 2, 5))
    mask_older_tokens(sample, earlier)
    assert sample.loss_mask == [0, 0, 1, 1, 1]
    sample.weight_version_spans = spans(("1", 0, 1), ("2", 2, 4), ("3", 4, 5))
    mask_older_tokens(sample, earlier)
    assert sample.loss_mask == [0, 0, 0, 0, 1]


def test_a_response_that_started_again_owes_nothing_to_the_earlier_one() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 0], status=Status.ABORTED)
    earlier = mask_earlier_tokens(sample)
    again = Sample(tokens=[1, 8, 9, 7], response_length=3, loss_mask=[1, 1, 1])
    again.weight_version_spans = spans(("2", 0, 3))
    mask_older_tokens(again, earlier)
    assert again.loss_mask == [1, 1, 1]


def test_without_versions_the_mask_stays() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[0, 1])
    mask_older_tokens(sample)
    assert sample.loss_mask == [0, 1]


def test_masking_in_a_rollout_follows_the_switch(model_path, engine):
    flags = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "rollout_batch_size": 1}
    switching(engine, cuts=1, length=4)
    with open_context(model_path, engine.url, n_samples_per_prompt=1, rollout_max_response_len=4, **flags) as context:
        sample = rollout(context, ListSource(["ab"], 1)).samples[0][0]
    assert sample.weight_version_spans == spans(("1", 0, 1), ("2", 1, 4))
    assert sample.loss_mask == [0, 1, 1, 1]
