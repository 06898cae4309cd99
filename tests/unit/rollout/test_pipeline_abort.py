"""The end of a training rollout: what still runs is aborted, put back and continued."""

from __future__ import annotations

import json
import time

import pytest

from slime.data.source import RolloutDataSourceWithBuffer
from slime.types import Status
from tests.support.fake_engine import Answer, FakeEngine
from tests.support.pipeline import rollout, write_plugin
from tests.support.prompts import data_args
from tests.support.rollout_args import ListSource, open_context


def test_surplus_is_aborted_and_recycled_with_partial_rollout(model_path):
    # Group indices 4 and 5 of the over-sampled batch of 6 are slow.
    prompts = ["fast"] * 4 + ["slow"] * 2
    with FakeEngine() as engine:
        slow_ids = None
        with open_context(model_path, engine.url, over_sampling_batch_size=6, partial_rollout=True) as context:
            slow_ids = context.tokenizer.encode("slow")

            def answer(input_ids, params):
                engine.latency_seconds = 30.0 if input_ids == slow_ids else 0.0
                return Answer([65, 66, 67], "ABC")

            engine.answer = answer
            source = ListSource(prompts, 2)
            started = time.monotonic()
            output = rollout(context, source, rollout_id=7)
            assert time.monotonic() - started < 5
            assert context.limit.in_use == 0
            assert [g[0].group_index for g in output.samples] == [0, 1, 2, 3]
            assert output.metrics["rollout/unfinished_groups"] == 2
            assert [g[0].group_index for g in source.returned] == [4, 5]
            recycled = [s for g in source.returned for s in g]
            assert {s.status for s in recycled} == {Status.ABORTED}
            assert all(s.response_length == 1 and s.metadata["start_rollout_id"] == 7 for s in recycled)

            engine.answer = lambda input_ids, params: Answer([68] * min(2, params["max_new_tokens"]), "DD")
            engine.latency_seconds = 0.0
            engine.requests.clear()
            output = rollout(context, source, rollout_id=8)
    resumed = output.samples[0][0]
    assert resumed.group_index == 4
    assert resumed.tokens == [*slow_ids, 65, 68, 68]
    assert resumed.response == "ADD"
    assert resumed.rollout_log_probs == [-0.5, -0.5, -0.51]
    assert resumed.metadata["start_rollout_id"] == 7
    request = next(r for r in engine.requests if r["input_ids"] == [*slow_ids, 65])
    assert request["sampling_params"]["max_new_tokens"] == 15


def test_offpolicy_tokens_of_a_resumed_sample_are_masked(model_path, engine):
    flags = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "rollout_batch_size": 1}
    with open_context(model_path, engine.url, **flags) as context:
        source = ListSource(["ab"], 2)
        group = source.get_samples(1)[0]
        for sample in group:
            sample.tokens = [*context.tokenizer.encode("ab"), 65, 66]
            sample.append_response_tokens(tokens=[], text="")
            sample.response_length, sample.rollout_log_probs, sample.loss_mask = 2, [-1.0, -2.0], [1, 1]
            sample.status = Status.ABORTED
        source.add_samples([group])
        output = rollout(context, source)
    assert output.samples[0][0].loss_mask == [0, 0, 1, 1, 1]


def test_a_slow_judge_does_not_hold_the_abort(model_path, engine, tmp_path, caplog):
    plugin = write_plugin(
        tmp_path,
        "judging = 0\n"
        "async def judge(args, sample, **kw):\n"
        "    global judging\n"
        "    first = sample.group_index in (4, 5) and not sample.metadata.pop('again', False)\n"
        "    judging += first\n"
        "    while first or judging < 4:\n"
        "        await asyncio.sleep(0.001)\n"
        "    return 1.0\n",
    )
    flags = {
        "custom_rm_path": f"{plugin}:judge",
        "over_sampling_batch_size": 6,
        "partial_rollout": True,
        "abort_timeout_seconds": 0.3,
    }
    with open_context(model_path, engine.url, **flags) as context:
        source = ListSource(["a"], 2)
        started = time.monotonic()
        output = rollout(context, source)
        assert time.monotonic() - started < 5
        assert "2 groups did not end within 0.3 s" in caplog.text
        # What waited for its judge keeps its response and is only scored the next time.
        assert all(s.status is Status.COMPLETED and s.reward is None for g in source.returned for s in g)
        for sample in (s for g in source.returned for s in g):
            sample.metadata["again"] = True
        output = rollout(context, source)
    assert [g[0].group_index for g in output.samples][:2] == [4, 5]
    assert all(s.reward == 1.0 for g in output.samples for s in g)
    assert len(engine.requests) <= 12 + 8, "recycled groups must not be generated again"


def test_control_requests_are_not_cut(model_path):
    prompts = ["fast"] * 4 + ["slow"] * 2
    with FakeEngine() as engine:
        engine.abort_latency_seconds = 0.4
        with open_context(model_path, engine.url, over_sampling_batch_size=6, partial_rollout=True) as context:
            slow_ids = context.tokenizer.encode("slow")

            def answer(input_ids, params):
                engine.latency_seconds = 30.0 if input_ids == slow_ids else 0.0
                return Answer([65, 66, 67], "ABC")

            engine.answer = answer
            source = ListSource(prompts, 2)
            rollout(context, source)
        assert len(source.returned) == 2
        assert engine.aborts >= 1
        assert engine.cut_aborts == 0


@pytest.mark.parametrize("slow_every", [1000, 3])
def test_no_prompt_is_lost_or_trained_twice_over_a_resume(model_path, tmp_path, slow_every):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"prompt {i:03}", "label": i}) + "\n" for i in range(100)))
    flags = {"over_sampling_batch_size": 7, "partial_rollout": True}
    with FakeEngine() as engine, open_context(model_path, engine.url, **flags) as context:

        def answer(input_ids, params):
            fresh = len(input_ids) == len("prompt 000")
            engine.latency_seconds = 30.0 if fresh and sum(input_ids) % slow_every == 0 else 0.0
            return Answer([65, 66, 67], "ABC")

        engine.answer = answer
        before = RolloutDataSourceWithBuffer(data_args(data, save=str(tmp_path)))
        trained = []
        for rollout_id in range(2):
            trained += [group[0].group_index for group in rollout(context, before, rollout_id).samples]
            before.snapshot(rollout_id)
        rollout(context, before, 2)  # ahead of training, and lost with the process
        before.save(1)

        after = RolloutDataSourceWithBuffer(data_args(data, load=str(tmp_path)))
        after.load(1)
        for rollout_id in range(2, 6):
            trained += [group[0].group_index for group in rollout(context, after, rollout_id).samples]
    assert len(trained) == 24
    waiting = [group[0].group_index for group in after.buffer]
    assert sorted(trained + waiting) == list(range(after.sample_group_index))
