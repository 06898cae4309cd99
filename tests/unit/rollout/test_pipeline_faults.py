"""Training rollouts in which something fails: one sample, or the whole run."""

from __future__ import annotations

import pytest

from slime.errors import ConfigError, DataError, PluginError, WaitTimeoutError
from slime.rollout.failures import TooManyFailuresError
from slime.types import Sample, Status
from tests.support.fake_engine import FakeEngine
from tests.support.pipeline import rollout, write_plugin
from tests.support.rollout_args import ListSource, open_context


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


@pytest.mark.parametrize(
    ("groups", "text"),
    [([[Sample()]], "groups .lists. of 2 samples .--n-samples-per-prompt., found 1 samples"), (7, "found int")],
)
def test_a_data_source_that_breaks_its_contract(model_path, engine, groups, text):
    with (
        open_context(model_path, engine.url) as context,
        pytest.raises(PluginError, match=f"--data-source-path.*{text}"),
    ):
        rollout(context, lambda num_groups: groups)


def test_a_slow_judge_costs_the_reward_not_the_run(model_path, engine, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "async def judge(args, sample, **kw):\n"
        "    await asyncio.sleep(60 if sample.index == 3 else 0)\n"
        "    return 1.0\n",
    )
    with open_context(model_path, engine.url, custom_rm_path=f"{plugin}:judge", rm_timeout=0.1) as context:
        output = rollout(context, ListSource(["a"], 2))
    assert [s.reward for group in output.samples for s in group] == [1.0] * 3 + [0.0] + [1.0] * 4
    assert output.samples[1][1].status is Status.COMPLETED
    assert output.metrics["rollout/reward/timeouts"] == 1
