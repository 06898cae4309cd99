"""Dynamic filters, the drop rule and the containers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.errors import PluginError
from slime.rollout.filters import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    should_drop_dynamic_filter_output,
)
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, first_index, iter_samples
from slime.types import Sample, Status

ARGS = SimpleNamespace(reward_key=None)


def group(*rewards) -> list[Sample]:
    return [Sample(index=i, reward=r) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [
        ((0.0, 1.0), True, None),
        ((0.0, 0.0), False, "zero_std_0.0"),
        ((1, 1, 1), False, "zero_std_1.0"),
        ((0.25, 0.25 + 1e-7), False, "zero_std_0.2"),
        ((1.0,), False, "zero_std_1.0"),
    ],
)
def test_nonzero_std(rewards, keep, reason):
    output = check_reward_nonzero_std(ARGS, group(*rewards))
    assert (output.keep, output.reason) == (keep, reason)


def test_nonzero_std_reads_the_reward_key_flattens_and_leaves_failed_samples_out():
    args = SimpleNamespace(reward_key="score")
    fanned = [[Sample(reward={"score": 1.0}), Sample(reward={"score": 1.0})], Sample(reward={"score": 0.0})]
    assert check_reward_nonzero_std(args, fanned).keep
    samples = group(1.0, 1.0, 0.0)
    samples[2].status = Status.FAILED
    assert check_reward_nonzero_std(ARGS, samples).reason == "zero_std_1.0"
    for sample in samples:
        sample.status = Status.FAILED
    assert check_reward_nonzero_std(ARGS, samples).reason == "all_failed"


def test_drop_rule():
    keep = DynamicFilterOutput(keep=True)
    drop = DynamicFilterOutput(keep=False)
    fallback = check_reward_nonzero_std_with_fallback(ARGS, group(0.0, 0.0))
    assert not should_drop_dynamic_filter_output(keep, remaining_batch_size=9, target_batch_size=4)
    assert should_drop_dynamic_filter_output(drop, remaining_batch_size=1, target_batch_size=4)
    assert should_drop_dynamic_filter_output(fallback, remaining_batch_size=5, target_batch_size=4)
    assert not should_drop_dynamic_filter_output(fallback, remaining_batch_size=4, target_batch_size=4)


def test_call_accepts_the_output_a_bool_and_nothing_else():
    assert call_dynamic_filter(None, ARGS, []).keep
    assert not call_dynamic_filter(lambda args, samples: False, ARGS, []).keep
    assert call_dynamic_filter(lambda args, samples: DynamicFilterOutput(True), ARGS, []).keep
    with pytest.raises(PluginError, match=r"--dynamic-sampling-filter-path.*str"):
        call_dynamic_filter(lambda args, samples: "yes", ARGS, [])


def test_gatherer_counts_by_reason():
    gatherer = MetricGatherer()
    for reason in ("a", "b", "a", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {
        "rollout/dynamic_filter/drop_a": 2,
        "rollout/dynamic_filter/drop_b": 1,
        "rollout/dynamic_filter/drop_unspecified": 1,
    }
    assert gatherer.num_dropped == 4


def test_call_rollout_fn_wraps_bare_returns():
    samples = [group(1.0)]
    assert call_rollout_fn(lambda args, evaluation: samples, ARGS, evaluation=False).samples is samples
    assert call_rollout_fn(lambda args, evaluation: {"a": {}}, ARGS, evaluation=True).data == {"a": {}}
    train, evaluation = RolloutFnTrainOutput([]), RolloutFnEvalOutput({})
    assert call_rollout_fn(lambda evaluation: train, evaluation=False) is train
    assert call_rollout_fn(lambda evaluation: evaluation_output(evaluation), evaluation=True).data == {"on": True}
    assert evaluation.metrics is None
    with pytest.raises(PluginError, match=r"--rollout-function-path: .*<lambda> returned NoneType"):
        call_rollout_fn(lambda evaluation: None, evaluation=False)
    with pytest.raises(PluginError, match="--eval-function-path"):
        call_rollout_fn(lambda evaluation: samples, evaluation=True)


def evaluation_output(evaluation: bool) -> RolloutFnEvalOutput:
    return RolloutFnEvalOutput({"on": evaluation})


def test_flattening_and_sort_key():
    a, b, c = group(1, 2, 3)
    assert list(iter_samples([[a, b], c])) == [a, b, c]
    assert first_index([[b], a]) == 1
    assert first_index([]) == -1
