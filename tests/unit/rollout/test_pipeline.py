"""The training rollout against a fake engine: which groups it delivers, and what it asks the engine for."""

from __future__ import annotations

import logging

import pytest

from slime.errors import DataError
from slime.rollout import selection
from slime.types import Status
from tests.support.fake_engine import FakeEngine
from tests.support.pipeline import rollout, write_plugin
from tests.support.rollout_args import ListSource, open_context


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


def test_every_request_has_its_own_seed_and_a_second_run_the_same_ones(model_path, engine):
    seeds = []
    for seed in (1, 1, 2):
        del engine.requests[:]
        with open_context(model_path, engine.url, rollout_batch_size=2, rollout_seed=seed) as context:
            rollout(context, ListSource(["a", "bb"], 2))
        seeds.append(sorted(r["sampling_params"]["sampling_seed"] for r in engine.requests))
    assert len(set(seeds[0])) == len(seeds[0]) == 4
    assert seeds[0] == seeds[1]
    assert not set(seeds[0]) & set(seeds[2])


def test_no_routing_key_unless_asked_for(model_path, engine):
    with open_context(model_path, engine.url, rollout_batch_size=1) as context:
        rollout(context, ListSource(["a"], 2))
    assert all("X-SMG-Routing-Key" not in h for h in engine.headers)


def test_progress_shows_target_and_mean_reward(model_path, engine, caplog):
    caplog.set_level(logging.INFO, logger="slime.rollout.progress")
    with open_context(model_path, engine.url, custom_rm_path="tests.unit.rollout.test_pipeline.half") as context:
        rollout(context, ListSource(["a"], 2), rollout_id=5)
    assert "rollout 5: 4/4 groups, mean reward 0.500" in caplog.text
    seen = context.progress.snapshot()
    assert (seen.label, seen.done, seen.total, seen.unit) == ("rollout 5", 4, 4, "groups")
    assert (seen.note, seen.sequence) == ("reward 0.500", 5)


async def half(args, sample, **kwargs) -> float:
    return 0.5


def test_context_length_bounds_the_response(model_path, engine):
    with open_context(model_path, engine.url, rollout_max_context_len=6, rollout_batch_size=2) as context:
        output = rollout(context, ListSource(["abcd", "abcdef"], 2))
    assert [g[0].status for g in output.samples] == [Status.TRUNCATED, Status.TRUNCATED]
    assert [g[0].response_length for g in output.samples] == [2, 0]
    assert {r["sampling_params"]["max_new_tokens"] for r in engine.requests} == {2}
