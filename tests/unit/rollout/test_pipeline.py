"""The training rollout against a fake engine: selection, abort, recycling, failures."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from slime.errors import ConfigError, DataError, PluginError, WaitTimeoutError
from slime.rollout import selection
from slime.rollout.failures import TooManyFailuresError
from slime.rollout.filters import DynamicFilterOutput
from slime.rollout.pipeline import generate_rollout
from slime.rollout.types import RolloutFnTrainOutput
from slime.types import Sample, Status
from tests.support.fake_engine import Answer, FakeEngine
from tests.support.rollout_args import ListSource, open_context


def rollout(context, source, rollout_id=0) -> RolloutFnTrainOutput:
    return context.generate(generate_rollout, rollout_id, source)


def write_plugin(folder, text: str) -> str:
    path = folder / "plugin.py"
    path.write_text("import asyncio\nfrom slime.utils.types import Sample\n" + text)
    return str(path)


def test_a_rollout_delivers_the_target_sorted(model_path, engine):
    with open_context(model_path, engine.url) as context:
        output = rollout(context, ListSource(["one", "two", "three"], 2))
        assert context.limit.in_use == 0
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    sample = output.samples[0][0]
    assert sample.status is Status.COMPLETED
    assert sample.tokens[:3] == list(context.tokenizer.encode("one"))
    assert sample.response_length == 3 == len(sample.rollout_log_probs) == sum(sample.loss_mask)
    assert sample.rollout_log_probs == [-0.5, -0.51, -0.52]
    assert sample.reward in (0, 1)
    assert sample.weight_versions == ["1"]
    assert len({s.session_id for g in output.samples for s in g}) == 8
    request = engine.requests[0]
    assert request["return_logprob"] is True
    assert "stop" not in request["sampling_params"], "unset parameters must not be sent as null"
    assert request["sampling_params"]["max_new_tokens"] == 16


def test_concurrency_stays_within_the_limit(model_path):
    with FakeEngine(latency_seconds=0.02) as engine:
        with open_context(model_path, engine.url, sglang_server_concurrency=3) as context:
            rollout(context, ListSource(["a"], 2))
        assert engine.max_running == 3


def test_dynamic_filter_drops_are_counted_and_replaced(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def keep_even(args, samples, **kw):\n"
        "    odd = samples[0].group_index % 2\n"
        "    return DynamicFilterOutput(keep=not odd, reason='odd' if odd else None)\n",
    )
    flags = {"dynamic_sampling_filter_path": f"{plugin}:keep_even", "over_sampling_batch_size": 5}
    with open_context(model_path, engine.url, **flags) as context:
        source = ListSource(["a"], 2)
        output = rollout(context, source)
    kept = [group[0].group_index for group in output.samples]
    assert len(kept) == 4
    assert all(i % 2 == 0 for i in kept)
    assert kept == sorted(kept)
    assert output.metrics["rollout/dynamic_filter/drop_odd"] >= 3
    assert source.drawn % 5 == 0


def test_a_filter_that_drops_everything_stops_the_rollout(model_path, engine, monkeypatch, caplog):
    monkeypatch.setattr(selection, "MAX_DROPPED_PER_TARGET", 3)
    monkeypatch.setattr(selection, "WARN_DROPPED_PER_TARGET", 1)
    name = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    flags = {"dynamic_sampling_filter_path": name, "n_samples_per_prompt": 1}
    with open_context(model_path, engine.url, **flags) as context:
        with pytest.raises(DataError, match=r"check_reward_nonzero_std has dropped 12 groups and kept 0 of 4"):
            rollout(context, ListSource(["a"], 1))
        assert context.limit.in_use == 0
    assert "has dropped 4 groups" in caplog.text


def test_fallback_keeps_groups_rather_than_sample_again(model_path, engine):
    name = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
    flags = {"dynamic_sampling_filter_path": name, "n_samples_per_prompt": 1}
    with open_context(model_path, engine.url, **flags) as context:
        source = ListSource(["a"], 1)
        output = rollout(context, source)
    assert len(output.samples) == 4
    assert source.drawn == 4


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


def test_sample_filter_and_all_samples_hook(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "SEEN = {}\n"
        "def drop_first(args, groups):\n"
        "    groups[0][0].remove_sample = True\n"
        "def look(args, groups, source):\n"
        "    SEEN['groups'] = len(groups); SEEN['more'] = len(source(1)); SEEN['again'] = len(source.get_samples(1))\n"
        "    SEEN['label'] = source.label\n"
        "def odd_only(args, samples): return samples[0].group_index % 2 == 1\n",
    )
    flags = {
        "rollout_sample_filter_path": f"{plugin}:drop_first",
        "rollout_all_samples_process_path": f"{plugin}:look",
        "dynamic_sampling_filter_path": f"{plugin}:odd_only",
    }
    with open_context(model_path, engine.url, **flags) as context:
        output = rollout(context, ListSource(["a"], 2, label="7"))
        seen = context.hooks.all_samples.__globals__["SEEN"]
    assert output.samples[0][0].remove_sample
    assert not output.samples[0][1].remove_sample
    assert seen["groups"] >= 8
    assert (seen["more"], seen["again"], seen["label"]) == (1, 1, "7")


def test_a_function_that_raises_costs_one_sample(model_path, engine, tmp_path, caplog):
    plugin = write_plugin(
        tmp_path,
        "from slime.rollout.sglang_rollout import generate as builtin\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if sample.index == 3:\n"
        "        raise KeyError('no such tool')\n"
        "    return await builtin(args, sample, sampling_params)\n",
    )
    with open_context(model_path, engine.url, custom_generate_function_path=plugin) as context:
        output = rollout(context, ListSource(["a"], 2))
        assert context.limit.in_use == 0
    failed = output.samples[1][1]
    assert failed.status is Status.FAILED
    assert failed.remove_sample
    assert failed.reward == 0
    assert failed.metadata["error"] == {
        "stage": "generate",
        "type": "KeyError",
        "message": "'no such tool'",
        "file": plugin,
        "line": 6,
    }
    failed.check_alignment()
    assert failed.response_length == 1
    assert failed.loss_mask == [0]
    assert sum(s.status is Status.FAILED for g in output.samples for s in g) == 1
    assert output.metrics["rollout/failed_samples"] == 1
    assert f"{plugin}:6" in caplog.text


def test_too_many_failures_stop_the_rollout_with_the_cause(model_path, engine, tmp_path):
    plugin = write_plugin(tmp_path, "async def reward_func(args, sample, **kw):\n    return 1 / 0\n")
    with open_context(model_path, engine.url, custom_rm_path=plugin) as context:
        with pytest.raises(TooManyFailuresError, match=r"2 samples failed.*plugin.py:4: ZeroDivisionError"):
            rollout(context, ListSource(["a"], 2))
        assert context.limit.in_use == 0


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ({"rm_type": "no_such"}, ConfigError, "no_such"),
        ({"custom_generate_function_path": "PLUGIN:wrong_type"}, PluginError, "returned .*int.*expected Sample"),
        ({"custom_generate_function_path": "PLUGIN:not_async"}, PluginError, "must be `async def`"),
        ({"custom_generate_function_path": "PLUGIN:too_few"}, PluginError, "sampling_params"),
        ({"custom_generate_function_path": "PLUGIN:missing"}, PluginError, "--custom-generate-function-path.*missing"),
        ({"custom_generate_function_path": "PLUGIN:fan_out", "group_rm": True}, PluginError, "--group-rm"),
    ],
)
def test_broken_contracts_stop_at_once(model_path, engine, tmp_path, flags, error, message):
    plugin = write_plugin(
        tmp_path,
        "async def wrong_type(args, sample, sampling_params): return 3\n"
        "def not_async(args, sample, sampling_params): return sample\n"
        "async def too_few(args, sample): return sample\n"
        "async def fan_out(args, sample, sampling_params): return [sample]\n",
    )
    flags = {k: v.replace("PLUGIN", plugin) if isinstance(v, str) else v for k, v in flags.items()}
    with pytest.raises(error, match=message), open_context(model_path, engine.url, **flags) as context:
        rollout(context, ListSource(["a"], 2))


def test_a_dead_engine_stops_the_rollout(model_path):
    with FakeEngine() as gone:
        pass
    flags = {"http_max_retries": 1}
    with open_context(model_path, gone.url, **flags) as context:
        with pytest.raises(WaitTimeoutError, match="rollout process waited"):
            rollout(context, ListSource(["a"], 2))
        assert context.limit.in_use == 0


def test_no_prompts_is_a_data_error(model_path, engine):
    with open_context(model_path, engine.url) as context, pytest.raises(DataError, match="no prompts"):
        rollout(context, ListSource(["a"], 2, limit=2))


def test_group_rm_scores_the_group_in_one_call(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "async def rank(args, samples, **kw):\n    return [float(i) for i in range(len(samples))]\n",
    )
    with open_context(model_path, engine.url, custom_rm_path=f"{plugin}:rank", group_rm=True) as context:
        output = rollout(context, ListSource(["a"], 2))
    assert [[s.reward for s in g] for g in output.samples] == [[0.0, 1.0]] * 4


def test_fanned_out_samples_are_scored_sorted_and_recycled_as_prompts(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "import copy\n"
        "async def fan_out(args, sample, sampling_params):\n"
        "    from slime.rollout.sglang_rollout import generate\n"
        "    parts = [copy.deepcopy(sample) for _ in range(2)]\n"
        "    for part in parts:\n"
        "        part.rollout_id = sample.index\n"
        "        await generate(args, part, sampling_params)\n"
        "    parts[0].reward = 5.0\n"
        "    return parts\n",
    )
    flags = {
        "custom_generate_function_path": f"{plugin}:fan_out",
        "dynamic_sampling_filter_path": (
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
        ),
        "rollout_batch_size": 2,
    }
    with open_context(model_path, engine.url, **flags) as context:
        output = rollout(context, ListSource(["a"], 2))
    assert [len(g) for g in output.samples] == [2, 2]
    for group in output.samples:
        for parts in group:
            assert [p.reward == 5.0 for p in parts] == [True, parts[1].reward == 5.0]
            assert parts[1].reward in (0, 1)


def test_sample_hooks_run_in_order_with_the_keywords_they_take(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "def mark(args, sample, rollout_id):\n    sample.metadata['rollout'] = rollout_id\n"
        "async def replace(args, sample, **kw):\n"
        "    assert kw == {'rollout_id': 3, 'evaluation': False}\n"
        "    sample.metadata['seen'] = sample.metadata['rollout'] + 1\n"
        "    return sample\n",
    )
    with open_context(
        model_path, engine.url, rollout_sample_hook_path=(f"{plugin}:mark", f"{plugin}:replace")
    ) as context:
        output = rollout(context, ListSource(["a"], 2), rollout_id=3)
    assert all(s.metadata["seen"] == 4 for g in output.samples for s in g)


def test_neither_seed_nor_routing_key_unless_asked_for(model_path, engine):
    with open_context(model_path, engine.url, rollout_batch_size=1) as context:
        rollout(context, ListSource(["a"], 2))
    assert all("sampling_seed" not in r["sampling_params"] for r in engine.requests)
    assert all("X-SMG-Routing-Key" not in h for h in engine.headers)


def test_progress_shows_target_and_mean_reward(model_path, engine, caplog):
    caplog.set_level(logging.INFO, logger="slime.rollout.progress")
    with open_context(model_path, engine.url, custom_rm_path="tests.unit.rollout.test_pipeline.half") as context:
        rollout(context, ListSource(["a"], 2), rollout_id=5)
    assert "rollout 5: 4/4 groups, mean reward 0.500" in caplog.text


async def half(args, sample, **kwargs) -> float:
    return 0.5


def test_established_user_rollout_function(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group\n"
        "from slime.utils.async_utils import run\n"
        "from slime.utils.http_utils import post\n"
        "async def work(args, source):\n"
        "    state = GenerateState(args)\n"
        "    assert state.tokenizer is GenerateState(args).tokenizer\n"
        "    assert state.semaphore is GenerateState(args).semaphore\n"
        "    state.submit_generate_tasks(source.get_samples(2))\n"
        "    assert GenerateState(args).remaining_batch_size == 2\n"
        "    done, state.pendings = await asyncio.wait(state.pendings)\n"
        "    state.reset()\n"
        "    url = f'http://{args.sglang_router_ip}:{args.sglang_router_port}/echo'\n"
        "    assert await post(url, {'x': 1}) == {'x': 1}\n"
        "    return [t.result() for t in done]\n"
        "def generate_rollout(args, rollout_id, data_source, evaluation=False):\n"
        "    return run(work(args, data_source))\n",
    )
    from slime.plugins import load_plugin

    fn = load_plugin(f"{plugin}:generate_rollout", flag="--rollout-function-path", kind="other")
    with open_context(model_path, engine.url) as context:
        output = context.generate(fn, 0, ListSource(["a"], 2))
    assert sorted(len(g) for g in output.samples) == [2, 2]


def test_a_plugin_with_a_loop_of_its_own_shares_the_handles(model_path, engine):
    from slime.rollout.generate import generate_and_rm_group

    with open_context(model_path, engine.url, sglang_server_concurrency=1) as context:
        groups = ListSource(["a"], 2).get_samples(2)

        async def both():
            jobs = [generate_and_rm_group(context.args, g, context.sampling_params) for g in groups]
            return await asyncio.gather(*jobs)

        results = asyncio.run(both())
    assert all(s.response_length == 3 for g in results for s in g)
    assert engine.max_running == 1


def test_context_length_bounds_the_response(model_path, engine):
    with open_context(model_path, engine.url, rollout_max_context_len=6, rollout_batch_size=2) as context:
        output = rollout(context, ListSource(["abcd", "abcdef"], 2))
    assert [g[0].status for g in output.samples] == [Status.TRUNCATED, Status.TRUNCATED]
    assert [g[0].response_length for g in output.samples] == [2, 0]
    assert {r["sampling_params"]["max_new_tokens"] for r in engine.requests} == {2}


def test_samples_override_generation_and_reward(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "async def generate(args, sample, sampling_params, evaluation=False):\n"
        "    sample.tokens = [1, 2]; sample.response_length = 1; sample.response = 'own'\n"
        "    return sample\n"
        "async def seven(args, sample, **kw): return 7\n",
    )
    with open_context(model_path, engine.url, rollout_batch_size=1) as context:
        source = ListSource(["a"], 2)
        group = source.get_samples(1)[0]
        group[0].generate_function_path, group[0].custom_rm_path = f"{plugin}:generate", f"{plugin}:seven"
        source.add_samples([group])
        (first, second) = rollout(context, source).samples[0]
    assert (first.response, first.reward, first.status) == ("own", 7, Status.COMPLETED)
    assert second.response_length == 3
    assert second.reward in (0, 1)


def test_dict_rewards_need_no_help_from_the_progress_display(model_path, engine, tmp_path):
    plugin = write_plugin(tmp_path, "async def reward_func(args, sample, **kw): return {'score': 2.0, 'acc': True}\n")
    with open_context(model_path, engine.url, custom_rm_path=plugin, reward_key="score") as context:
        output = rollout(context, ListSource(["a"], 2))
    assert isinstance(output.samples[0][0], Sample)
    assert output.samples[0][0].reward == {"score": 2.0, "acc": True}


def test_keep_when_insufficient_is_part_of_the_established_output():
    assert DynamicFilterOutput(True).keep_when_insufficient is False
