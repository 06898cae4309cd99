"""Functions of users in a training rollout."""

from __future__ import annotations

import asyncio

from slime.rollout.filters import DynamicFilterOutput
from slime.types import Sample, Status
from tests.support.pipeline import rollout, write_plugin
from tests.support.rollout_args import ListSource, open_context


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
