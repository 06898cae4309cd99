"""Evaluation on several sets against a fake engine."""

from __future__ import annotations

import json

import pytest

from slime.errors import ConfigError, DataError
from slime.rollout.evaluate import eval_rollout_single_dataset
from slime.rollout.pipeline import generate_rollout
from slime.types import Status
from tests.support.fake_engine import Answer, FakeEngine
from tests.support.rollout_args import eval_set, open_context


def write_rows(path, prompts):
    path.write_text("\n".join(json.dumps({"input": p, "metadata": {"row": i}}) for i, p in enumerate(prompts)))
    return path


def evaluate(context, rollout_id=0):
    return context.evaluate(generate_rollout, rollout_id, None)


def test_sets_run_at_the_same_time_with_settings_of_their_own(model_path, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "async def length(args, sample, **kw): return len(sample.response)\n"
        "async def one(args, sample, **kw): return 1\n"
        "async def generate(args, sample, sampling_params, evaluation=False):\n"
        "    assert evaluation\n"
        "    from slime.rollout.sglang_rollout import generate\n"
        "    sample.metadata['custom'] = True\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    rewards = str(tmp_path / "rewards.py")
    sets = (
        eval_set(
            "aime",
            write_rows(tmp_path / "a.jsonl", ["one", "two", "three"]),
            n_samples_per_eval_prompt=2,
            custom_rm_path=f"{rewards}:length",
            temperature=0.5,
            max_response_len=2,
            metadata_overrides={"set": "aime"},
        ),
        eval_set(
            "gsm8k",
            write_rows(tmp_path / "b.jsonl", ["four"]),
            n_samples_per_eval_prompt=3,
            custom_rm_path=f"{rewards}:one",
            custom_generate_function_path=f"{rewards}:generate",
            rm_type="math",
            stop=("END",),
            max_response_len=7,
        ),
    )
    with FakeEngine(latency_seconds=0.1) as engine, open_context(model_path, engine.url, eval_datasets=sets) as context:
        output = evaluate(context)
        assert engine.max_running == 9, "the sets must not wait for each other"
        cold, prompts = engine.requests[:], dict(context.eval_datasets)
        again = evaluate(context, 1)
        assert context.eval_datasets == prompts
    assert list(output.data) == ["aime", "gsm8k"]
    aime, gsm8k = output.data["aime"], output.data["gsm8k"]
    assert [s.index for s in aime["samples"]] == list(range(6))
    assert [s.prompt for s in aime["samples"]] == ["one", "one", "two", "two", "three", "three"]
    assert aime["rewards"] == [2.0] * 6
    assert aime["truncated"] == [True] * 6
    assert aime["samples"][4].metadata == {"row": 2, "set": "aime"}
    assert gsm8k["rewards"] == [1.0] * 3
    assert gsm8k["truncated"] == [False] * 3
    assert gsm8k["samples"][0].metadata == {"row": 0, "rm_type": "math", "custom": True}
    params = {r["sampling_params"]["max_new_tokens"]: r["sampling_params"] for r in cold}
    assert params[2]["temperature"] == 0.5
    assert "stop" not in params[2]
    assert params[7]["stop"] == ["END"]
    assert again.data["aime"]["rewards"] == aime["rewards"]
    assert aime["group_ids"] == [s.group_index for s in aime["samples"]]
    assert again.data["aime"]["samples"][0] is not aime["samples"][0]


async def test_fan_out_is_flattened_and_the_reward_key_selects(model_path, engine, tmp_path):
    (tmp_path / "p.py").write_text(
        "import copy\n"
        "async def generate(args, sample, sampling_params):\n"
        "    parts = [copy.deepcopy(sample), copy.deepcopy(sample)]\n"
        "    for part in parts: part.reward = {'acc': 0.25, 'score': 3}\n"
        "    return parts\n"
    )
    sets = (
        eval_set("x", write_rows(tmp_path / "x.jsonl", ["a"]), custom_generate_function_path=str(tmp_path / "p.py")),
    )
    flags = {"eval_datasets": sets, "reward_key": "score", "eval_reward_key": "acc"}
    with open_context(model_path, engine.url, **flags) as context:
        results = await_on(context, eval_rollout_single_dataset(context.args, 0, sets[0]))
    assert results["x"]["rewards"] == [0.25, 0.25]


def await_on(context, coro):
    return context.loop_thread.run(coro, timeout_seconds=10)


def test_a_failure_counts_as_wrong(model_path, tmp_path, caplog):
    sets = (eval_set("x", write_rows(tmp_path / "x.jsonl", ["a"] * 20), rm_type="random"),)
    with FakeEngine() as engine, open_context(model_path, engine.url, eval_datasets=sets) as context:
        engine.faults.append(400)
        output = evaluate(context)
    failed = [s for s in output.data["x"]["samples"] if s.status is Status.FAILED]
    assert len(failed) == 1
    assert output.data["x"]["rewards"][failed[0].index] == 0.0
    assert output.metrics["eval/failed_samples"] == 1
    assert "fault 400" in failed[0].metadata["error"]["message"]


def test_long_prompts_are_dropped_and_nothing_left_is_an_error(model_path, engine, tmp_path):
    path = write_rows(tmp_path / "x.jsonl", ["ab", "abcdefgh"])
    with open_context(model_path, engine.url, eval_datasets=(eval_set("x", path),), eval_max_prompt_len=4) as context:
        assert [s.prompt for s in evaluate(context).data["x"]["samples"]] == ["ab"]
    sets = (eval_set("x", path),)
    flags = {"eval_datasets": sets, "eval_max_prompt_len": 1}
    nothing_left = pytest.raises(DataError, match="--eval-max-prompt-len")
    with open_context(model_path, engine.url, **flags) as context, nothing_left:
        evaluate(context)


def test_no_sets_and_group_rm_are_configuration_errors(model_path, engine, tmp_path):
    with open_context(model_path, engine.url) as context, pytest.raises(ConfigError, match="--eval-prompt-data"):
        evaluate(context)
    sets = (eval_set("x", write_rows(tmp_path / "x.jsonl", ["a"])),)
    refused = pytest.raises(ConfigError, match="--group-rm")
    with open_context(model_path, engine.url, eval_datasets=sets, group_rm=True) as context, refused:
        evaluate(context)


def test_evaluation_has_a_context_length_of_its_own(model_path, engine, tmp_path):
    sets = (eval_set("x", write_rows(tmp_path / "x.jsonl", ["abcd"]), rm_type="random"),)
    engine.answer = lambda ids, params: Answer([65] * params["max_new_tokens"], "A")
    flags = {"eval_datasets": sets, "rollout_max_context_len": 5, "eval_max_context_len": 7}
    with open_context(model_path, engine.url, **flags) as context:
        (sample,) = evaluate(context).data["x"]["samples"]
    assert sample.response_length == 3
