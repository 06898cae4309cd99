import itertools
import math
import random

import numpy as np
import pytest

from slime.observability.metrics import (
    Reduction,
    RolloutMetricOptions,
    compute_batch_metrics,
    compute_rollout_metrics,
    estimate_pass_at_k,
    is_repetitive,
    pass_rate_by_group,
    pass_rate_metrics,
    prompt_mismatch,
    reduce_metrics,
    reduction_of,
)
from slime.types import RolloutBatch, Sample


def make_sample(reward, length=4, status=Sample.Status.COMPLETED, **fields):
    return Sample(reward=reward, response_length=length, tokens=[1] * (length + 2), status=status, **fields)


def test_pass_at_k_matches_spec_vector_and_enumeration():
    assert [round(estimate_pass_at_k(8, 2, k), 4) for k in (1, 2, 4, 8)] == [0.25, 0.4643, 0.7857, 1.0]
    outcomes = [1, 1, 0, 0, 0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(outcomes, k))
        assert estimate_pass_at_k(5, 2, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_rate_counts_only_rewards_of_exactly_one_and_skips_single_samples():
    assert pass_rate_metrics([[1.0], [0.0]], "passrate/") == {}
    metrics = pass_rate_metrics([[1.0, 0.9], [0.5, 0.0]], "passrate/")
    assert metrics == {"passrate/pass@1": 0.25, "passrate/pass@2": 0.5}


def test_rollout_metrics_of_known_samples():
    groups = [
        [make_sample(1.0, 2), make_sample(1.0, 4, Sample.Status.TRUNCATED)],
        [make_sample(0.0, 6), [make_sample(1.0, 8, loss_mask=[1, 1] + [0] * 6), make_sample(0.0, 8)]],
    ]
    metrics = compute_rollout_metrics(groups, RolloutMetricOptions(num_gpus=2, log_passrate=True), 7.0)
    assert metrics["rollout/response_len/mean"] == pytest.approx((2 + 4 + 6 + 2 + 8) / 5)
    assert metrics["rollout/response_len/median"] == 4
    assert metrics["rollout/response_len/max"] == 8
    assert metrics["rollout/truncated_ratio"] == pytest.approx(0.2)
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert not any("count_0" in key for key in metrics)
    assert metrics["perf/tokens_per_gpu_per_sec"] == pytest.approx(28 / 7 / 2)
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == pytest.approx(22 / 7 / 2)
    assert metrics["perf/longest_sample_tokens_per_sec"] == pytest.approx(8 / 7)
    assert metrics["passrate/pass@1"] == pytest.approx((1.0 + 1 / 3) / 2)


def test_zero_std_is_absent_without_group_baseline_and_for_dict_rewards_uses_the_key():
    groups = [[make_sample({"acc": 1.0, "cat": "a"}), make_sample({"acc": 1.0, "cat": "b"})]]
    options = RolloutMetricOptions(reward_key="acc", reward_category_key="cat")
    metrics = compute_rollout_metrics(groups, options)
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert metrics["rollout/error_cat/a"] == 0.5
    ppo = compute_rollout_metrics(groups, RolloutMetricOptions(reward_key="acc", count_zero_std=False))
    assert not any("zero_std" in key for key in ppo)


def test_repetition_needs_length_and_compressibility():
    assert is_repetitive("ab" * 6000)
    assert not is_repetitive("ab" * 4000)
    noise = random.Random(0)
    assert not is_repetitive("".join(chr(noise.randrange(32, 127)) for _ in range(12000)))


def test_multi_turn_metrics_separate_environment_tokens():
    sample = make_sample(1.0, 10, loss_mask=[1] * 4 + [0] * 6, metadata={"round_number": 3})
    metrics = compute_rollout_metrics([[sample]], RolloutMetricOptions(log_multi_turn=True, max_response_len=10))
    assert metrics["multi_turn/raw_response_length/response_length_mean"] == 10
    assert metrics["multi_turn/wo_obs_response_length/response_length_max"] == 4
    assert metrics["multi_turn/raw_response_length/response_length_clip_ratio"] == 1
    assert metrics["multi_turn/multi_turn_metric/round_number_mean"] == 3


def test_top_p_metric_counts_trained_tokens_only():
    sample = make_sample(1.0, 3, loss_mask=[1, 0, 1])
    sample.rollout_top_p_token_offsets = np.array([0, 2, 2, 6], dtype=np.int32)
    assert compute_rollout_metrics([[sample]], RolloutMetricOptions())["rollout/top_p_kept_vocab_per_token"] == 3


def test_batch_metrics_are_plain_means_and_masked_log_probs():
    batch = RolloutBatch(
        rollout_id=0,
        tokens=[np.zeros(5, np.int32), np.zeros(7, np.int32)],
        response_lengths=[2, 3],
        loss_masks=[np.array([1, 0], np.float32), np.ones(3, np.float32)],
        rewards=[0.5, -0.5],
        raw_rewards=[1.0, 0.0],
        truncated=[True, False],
        sample_indices=[0, 1],
        group_ids=[0, 0],
        rollout_ids=[0, 1],
        rollout_mask_sums=[1.0, 3.0],
        weight_versions=[("3", "4"), ("3",)],
        rollout_log_probs=[np.array([-2.0, -9.0], np.float32), np.full(3, -1.0, np.float32)],
    )
    metrics = compute_batch_metrics(batch)
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/total_lengths"] == 6
    assert (metrics["rollout/weight_version/min"], metrics["rollout/weight_version/max"]) == (3, 4)
    assert metrics["rollout/mixed_weight_versions"] == 0.5
    assert metrics["rollout/truncated"] == 0.5
    assert metrics["rollout/rollout_log_probs"] == pytest.approx(-1.5)
    assert metrics["rollout/masked_frac"] == pytest.approx(1 / 5)


def test_correct_samples_are_those_that_passed():
    failed = make_sample(1.0, 9, status=Sample.Status.FAILED)
    cut = make_sample(1.0, 6, status=Sample.Status.TRUNCATED)
    groups = [[make_sample(1.0, 2), make_sample(0.0, 4)], [cut, make_sample(0.5, 8), failed]]
    metrics = compute_rollout_metrics(groups, RolloutMetricOptions(log_correct_samples=True))
    assert metrics["rollout/correct/ratio"] == 0.5
    assert metrics["rollout/correct/response_len/mean"] == 4
    assert metrics["rollout/correct/truncated_ratio"] == 0.5
    assert not any("correct" in name for name in compute_rollout_metrics(groups, RolloutMetricOptions()))
    wrong = compute_rollout_metrics([[make_sample(0.0, 4)]], RolloutMetricOptions(log_correct_samples=True))
    assert wrong["rollout/correct/ratio"] == 0
    assert "rollout/correct/response_len/mean" not in wrong


def test_prompt_mismatch_is_told_by_samples_of_one_completion():
    def told(prompt_tokens, versions):
        sample = make_sample(1.0, 3, weight_versions=versions)
        sample.tokens = list(range(8))
        sample.prefix_cache_info.total_prompt_tokens = prompt_tokens
        return sample

    same, other = told(5, ["1"]), told(6, ["1"])
    several_turns, unknown = told(20, ["1", "1"]), told(0, ["1"])
    assert prompt_mismatch([same, other, several_turns, unknown]) == 0.5
    assert prompt_mismatch([several_turns, unknown]) is None
    metrics = compute_rollout_metrics([[same, same], [other, same]], RolloutMetricOptions())
    assert metrics["rollout/prompt_mismatch"] == 0.25


def test_reductions_follow_the_declared_kind():
    rows = [
        {"train/loss": 1.0, "perf/train_time": 2.0, "rollout/response_len/max": 5.0, "train/step": 3.0},
        {"train/loss": 3.0, "perf/train_time": 4.0, "rollout/response_len/max": 4.0, "train/step": 4.0},
    ]
    assert reduce_metrics(rows) == {
        "train/loss": 2.0,
        "perf/train_time": 6.0,
        "rollout/response_len/max": 5.0,
        "train/step": 4.0,
    }
    assert reduction_of("rollout/zero_std/count_1.0") is Reduction.SUM
    assert reduction_of("rollout/engine_restarts") is Reduction.SUM
    assert reduction_of("rollout/requests_reissued") is Reduction.SUM
    assert reduction_of("rollout/dynamic_filter/drop_zero_std_0.0") is Reduction.SUM
    assert reduction_of("train/train_rollout_logprob_abs_diff_p99") is Reduction.MAX
    assert reduction_of("train/ratio_max") is Reduction.MAX
    assert reduction_of("train/ratio_min") is Reduction.MIN
    assert reduction_of("train/train_rollout_kl_k3") is Reduction.MEAN


def test_unrewarded_samples_give_nan_not_a_crash():
    metrics = compute_rollout_metrics([[make_sample(None), make_sample(None)]], RolloutMetricOptions())
    assert not any("zero_std" in key for key in metrics)
    assert math.isfinite(metrics["rollout/response_len/mean"])


def test_pass_rate_goes_by_group_id_whatever_order_and_size():
    rewards, ids = [1.0, 0.0, 0.0, 1.0, 1.0], [4, 9, 4, 9, 4]
    expected = pass_rate_metrics([[1.0, 0.0, 1.0], [0.0, 1.0]], "eval/x-")
    assert pass_rate_by_group(rewards, ids, "eval/x-") == expected
    pairs = list(zip(rewards, ids, strict=True))
    random.Random(0).shuffle(pairs)
    shuffled = pass_rate_by_group([r for r, _ in pairs], [g for _, g in pairs], "eval/x-")
    assert shuffled == pytest.approx(expected)
    assert set(expected) == {"eval/x-pass@1", "eval/x-pass@2"}


def test_failed_samples_have_no_part_in_reward_metrics():
    failed = make_sample(0.0, status=Sample.Status.FAILED)
    groups = [[make_sample(1.0), make_sample(1.0), failed], [failed, failed, failed]]
    metrics = compute_rollout_metrics(groups, RolloutMetricOptions(log_passrate=True))
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert "rollout/zero_std/count_0.0" not in metrics
    assert metrics["passrate/pass@2"] == 1
    batch = RolloutBatch(
        rollout_id=0,
        tokens=[np.zeros(5, np.int32)] * 3,
        response_lengths=[2] * 3,
        loss_masks=[np.ones(2, np.float32)] * 3,
        rewards=[0.5, -0.5, 0.0],
        raw_rewards=[1.0, 0.5, 0.0],
        truncated=[False, False, True],
        sample_indices=[0, 1, 2],
        group_ids=[0] * 3,
        rollout_ids=[0, 1, 2],
        rollout_mask_sums=[2.0] * 3,
        weight_versions=[()] * 3,
        extra={"failed": [False, False, True]},
    )
    metrics = compute_batch_metrics(batch)
    assert (metrics["rollout/raw_reward"], metrics["rollout/rewards"]) == (0.75, 0.0)
    assert metrics["rollout/truncated"] == pytest.approx(1 / 3)
    batch.extra["failed"] = [True] * 3
    assert "rollout/raw_reward" not in compute_batch_metrics(batch)
