"""Groups to columns."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime.data.batch import build_rollout_batch, flatten_groups
from slime.data.columns import batch_from_columns, batch_to_columns, fill_missing_ids
from slime.errors import PluginError
from slime.observability.metrics import compute_batch_metrics
from slime.types import Sample, Status
from slime.version_spans import VersionSpan


def batch_args(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": False,
        "overlong_buffer_len": None,
        "overlong_penalty_factor": 1.0,
        "rollout_max_response_len": 16,
        "reward_key": None,
        "custom_reward_post_process_path": None,
        "custom_convert_samples_to_train_data_path": None,
    }
    return SimpleNamespace(**{**values, **changes})


def sample(index: int, group: int | None, reward: Any, length: int = 3, **fields: Any) -> Sample:
    return Sample(
        index=index,
        group_index=group,
        tokens=[1, 2, *range(10, 10 + length)],
        response_length=length,
        reward=reward,
        status=Status.COMPLETED,
        **fields,
    )


def test_columns() -> None:
    groups = [
        [sample(0, 0, 1.0, 2, rollout_log_probs=[-1.0, -2.0]), sample(1, 0, 0.0, 3, rollout_log_probs=[-1.0] * 3)],
        [
            sample(2, 1, 5.0, 1, rollout_log_probs=[-0.5], loss_mask=[0]),
            sample(3, 1, 5.0, 2, rollout_log_probs=[0, 0], weight_versions=["1", "2"]),
        ],
    ]
    groups[1][1].status = Status.TRUNCATED
    batch = build_rollout_batch(batch_args(), 7, groups)
    assert batch.rollout_id == 7
    assert [t.tolist() for t in batch.tokens] == [[1, 2, 10, 11], [1, 2, 10, 11, 12], [1, 2, 10], [1, 2, 10, 11]]
    assert all(t.dtype == np.int32 for t in batch.tokens)
    assert batch.response_lengths == [2, 3, 1, 2]
    assert [m.tolist() for m in batch.loss_masks] == [[1, 1], [1, 1, 1], [0], [1, 1]]
    assert batch.rewards == [0.5, -0.5, 0.0, 0.0]
    assert batch.raw_rewards == [1.0, 0.0, 5.0, 5.0]
    assert batch.truncated == [False, False, False, True]
    assert batch.group_ids == [0, 0, 1, 1]
    assert len(set(batch.rollout_ids)) == 4
    assert batch.rollout_mask_sums == [2, 3, 0, 2]
    assert batch.weight_versions == [(), (), (), ("1", "2")]
    assert batch.rollout_log_probs is not None
    assert [p.tolist() for p in batch.rollout_log_probs] == [[-1, -2], [-1, -1, -1], [-0.5], [0, 0]]
    assert batch.teacher_log_probs is None
    assert batch.metadata is None
    assert batch.extra == {}


def test_baseline_by_group_id_in_any_order_and_size() -> None:
    rng = random.Random(0)
    members = [sample(i, i % 3 if i < 6 else 9, float(i * i)) for i in range(11)]
    members.append(sample(11, 20, 4.0))
    expected: dict[int, float] = {}
    for member in members:
        peers = [m.reward for m in members if m.group_index == member.group_index]
        centred = member.reward - np.mean(peers)
        expected[member.index] = centred / (np.std(peers, ddof=1) + 1e-6) if len(peers) > 1 else 0.0
    rng.shuffle(members)
    batch = build_rollout_batch(batch_args(grpo_std_normalization=True), 0, members)
    found = dict(zip(batch.sample_indices, batch.rewards, strict=True))
    assert found == pytest.approx(expected)


def test_fan_out_counts_once_and_shares_its_reward() -> None:
    fan = [sample(0, 0, 3.0, 2, rollout_id=50), sample(1, 0, 3.0, 4, rollout_id=50)]
    batch = build_rollout_batch(batch_args(), 0, [[fan, sample(2, 0, 0.0, 1)]])
    assert batch.rewards == [1.5, 1.5, -1.5]
    assert batch.rollout_ids[:2] == [50, 50]
    assert batch.rollout_ids[2] != 50
    assert batch.rollout_mask_sums == [6, 6, 1]


def test_fan_out_needs_rollout_ids() -> None:
    with pytest.raises(ValueError, match=r"sample 1 of group 0.*rollout_id"):
        build_rollout_batch(batch_args(), 0, [[[sample(0, 0, 1.0, rollout_id=3), sample(1, 0, 1.0)]]])


def test_groups_without_ids_stay_groups() -> None:
    samples, ids = flatten_groups([[sample(0, None, 1), sample(1, None, 1)], [sample(2, 5, 1)], [sample(3, None, 1)]])
    assert [s.index for s in samples] == [0, 1, 2, 3]
    assert ids[0] == ids[1]
    assert ids[2] == 5
    assert len({ids[0], 5, ids[3]}) == 3


def test_removed_sample_counts_in_its_group_but_is_not_trained() -> None:
    batch = build_rollout_batch(batch_args(), 0, [[sample(0, 0, 1.0, remove_sample=True), sample(1, 0, 0.0)]])
    assert batch.rewards == [0.5, -0.5]
    assert [m.tolist() for m in batch.loss_masks] == [[0, 0, 0], [1, 1, 1]]
    assert batch.rollout_mask_sums == [0, 3]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"advantage_estimator": "ppo"}, [1.0, 0.0]),
        ({"advantage_estimator": "reinforce_plus_plus"}, [1.0, 0.0]),
        ({"rewards_normalization": False}, [1.0, 0.0]),
        ({"advantage_estimator": "reinforce_plus_plus_baseline", "grpo_std_normalization": True}, [0.5, -0.5]),
        ({"advantage_estimator": "rloo", "grpo_std_normalization": True}, [1.0, -1.0]),
        ({"grpo_std_normalization": True}, [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)]),
    ],
)
def test_who_gets_a_baseline(changes: dict[str, Any], expected: list[float]) -> None:
    batch = build_rollout_batch(batch_args(**changes), 0, [[sample(0, 0, 1.0), sample(1, 0, 0.0)]])
    assert batch.rewards == pytest.approx(expected)


def test_overlong_penalty_comes_before_the_baseline_and_leaves_the_raw_reward() -> None:
    args = batch_args(overlong_buffer_len=4, overlong_penalty_factor=0.5, rollout_max_response_len=10)
    broken = sample(3, 1, 0.0, 10)
    broken.status = Status.FAILED
    groups = [
        [sample(0, 0, 1.0, 6), sample(1, 0, 1.0, 8), sample(2, 0, 0.0, 10)],
        [broken, sample(4, 1, 1.0, 20), sample(5, 1, 1.0, 1)],
    ]
    batch = build_rollout_batch(args, 0, groups)
    assert batch.extra["overlong_penalty"] == pytest.approx([0, -0.25, -0.5, 0, -0.5, 0])
    assert batch.raw_rewards == [1, 1, 0, 0, 1, 1]
    mean = (1 + 0.75 - 0.5) / 3
    assert batch.rewards == pytest.approx([1 - mean, 0.75 - mean, -0.5 - mean, 0.0, -0.25, 0.25])
    metrics = compute_batch_metrics(batch)
    assert metrics["rollout/overlong_penalty"] == pytest.approx(-1.25 / 5)
    assert metrics["rollout/overlong_frac"] == pytest.approx(3 / 5)
    assert metrics["rollout/raw_reward"] == pytest.approx(4 / 5)


def test_overlong_penalty_reaches_estimators_without_a_baseline() -> None:
    args = batch_args(advantage_estimator="reinforce_plus_plus", overlong_buffer_len=10, rollout_max_response_len=10)
    batch = build_rollout_batch(args, 0, [[sample(0, 0, 1.0, 5)]])
    assert batch.rewards == pytest.approx([0.5])
    assert "overlong_penalty" not in build_rollout_batch(batch_args(), 0, [[sample(0, 0, 1.0, 5)]]).extra


def test_reward_parts_and_logged_override() -> None:
    groups = [[sample(0, 0, {"score": 1, "acc": True}, metadata={"raw_reward": 0.25}), sample(1, 0, {"score": -1})]]
    batch = build_rollout_batch(batch_args(reward_key="score"), 0, groups)
    assert batch.rewards == [1.0, -1.0]
    assert batch.raw_rewards == [0.25, -1.0]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"reward": None}, "the reward of sample 4 of group 2 must be a finite number, found None"),
        ({"reward": float("nan")}, "finite number, found nan"),
        ({"reward": {"score": 1, "acc": 0}}, "parts acc, score and --reward-key is None"),
        ({"loss_mask": [1]}, "sample 4 of group 2 .completed.: loss_mask has 1 entries"),
        ({"tokens": []}, "has 0 tokens and a response of 3"),
        ({"response_length": 5}, "has 5 tokens and a response of 5"),
    ],
)
def test_unready_samples_are_named(bad: dict[str, Any], text: str) -> None:
    broken = sample(4, 2, 1.0)
    for name, value in bad.items():
        setattr(broken, name, value)
    with pytest.raises(ValueError, match=text):
        build_rollout_batch(batch_args(), 0, [[sample(3, 2, 1.0), broken]])


def test_nothing_to_train_on() -> None:
    with pytest.raises(ValueError, match=r"rollout 3 has no samples"):
        build_rollout_batch(batch_args(), 3, [])


def test_partly_missing_log_probs_leave_the_column_out(caplog: pytest.LogCaptureFixture) -> None:
    groups = [[sample(0, 0, 1.0, rollout_log_probs=[-1.0] * 3), sample(1, 0, 0.0)]]
    assert build_rollout_batch(batch_args(), 0, groups).rollout_log_probs is None
    assert "1 of 2 samples have no rollout_log_probs" in caplog.text
    groups = [[sample(0, 0, 1.0, rollout_log_probs=[-1.0] * 3), sample(1, 0, 0.0, 0)]]
    rows = build_rollout_batch(batch_args(), 0, groups).rollout_log_probs
    assert rows is not None
    assert [len(row) for row in rows] == [3, 0]


def test_optional_columns() -> None:
    groups = [
        [
            sample(0, 0, 1.0, metadata={"round_number": 2, "source_name": "web"}, train_metadata={"a": 1}),
            sample(1, 0, 1.0),
        ]
    ]
    batch = build_rollout_batch(batch_args(), 0, groups)
    assert batch.extra["round_number"] == [2, 0]
    assert batch.extra["source_names"] == ["web", "unknown"]
    assert (batch.rollout_top_p_token_ids, batch.rollout_routed_experts) == (None, None)
    assert batch.metadata == [{"a": 1}, None]


def int32(values: Any) -> Any:
    return np.array(values, dtype=np.int32)


def replayed(index: int, group: int) -> Sample:
    kept = {"rollout_top_p_token_ids": int32([10, 4, 11]), "rollout_top_p_token_offsets": int32([0, 2, 3])}
    return sample(index, group, 1.0, 2, rollout_routed_experts=np.ones((3, 2, 1), np.int32), **kept)


def test_samples_without_replay_data_have_no_restriction_and_no_routes() -> None:
    batch = build_rollout_batch(batch_args(), 0, [[replayed(0, 0), sample(1, 0, 0.0, 3)]])
    assert batch.rollout_top_p_token_ids is not None
    assert batch.rollout_top_p_token_offsets is not None
    assert batch.rollout_routed_experts is not None
    assert [row.tolist() for row in batch.rollout_top_p_token_ids] == [[10, 4, 11], []]
    assert [row.tolist() for row in batch.rollout_top_p_token_offsets] == [[0, 2, 3], [0, 0, 0, 0]]
    np.testing.assert_array_equal(batch.rollout_routed_experts[0], 1)
    np.testing.assert_array_equal(batch.rollout_routed_experts[1], np.full((4, 2, 1), -1))
    assert {row.dtype for row in batch.rollout_routed_experts} == {np.dtype(np.int32)}


HOOKS = """
def post_process(args, samples):
    raw = [s.reward for s in samples]
    return raw, [2 * r for r in raw]

def short(args, samples):
    return [1.0], [1.0]

def wrong(args, samples):
    return [0.0] * len(samples)

def convert(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [s.reward for s in samples],
        "rollout_ids": [4] * len(samples),
        "custom": [s.index for s in samples],
    }

def incomplete(args, samples):
    return {"tokens": []}
"""


@pytest.fixture
def hooks(tmp_path: Path) -> str:
    file = tmp_path / "hooks.py"
    file.write_text(HOOKS)
    return str(file)


def test_reward_hook(hooks: str) -> None:
    groups = [[sample(0, 0, 1.0), sample(1, 0, 3.0)]]
    batch = build_rollout_batch(batch_args(custom_reward_post_process_path=f"{hooks}:post_process"), 0, groups)
    assert (batch.raw_rewards, batch.rewards) == ([1.0, 3.0], [2.0, 6.0])
    for name, text in (("short", "got 2 samples and returned 1"), ("wrong", "must return .raw_rewards, rewards")):
        with pytest.raises(PluginError, match=text):
            build_rollout_batch(batch_args(custom_reward_post_process_path=f"{hooks}:{name}"), 0, groups)


def test_conversion_hook(hooks: str) -> None:
    groups = [[sample(0, 0, 1.0, 2), sample(1, 0, 3.0, 3)]]
    args = batch_args(custom_convert_samples_to_train_data_path=f"{hooks}:convert")
    batch = build_rollout_batch(args, 0, groups)
    assert batch.rewards == [1.0, 3.0]
    assert batch.rollout_mask_sums == [5.0, 5.0]
    assert batch.group_ids == [0, 0]
    assert batch.extra == {"custom": [0, 1]}
    args = batch_args(custom_convert_samples_to_train_data_path=f"{hooks}:incomplete")
    with pytest.raises(PluginError, match=r"columns response_lengths, rewards are missing; found tokens"):
        build_rollout_batch(args, 0, groups)


def test_columns_round_trip() -> None:
    groups = [
        [
            sample(0, 3, 1.0, 2, rollout_log_probs=[-1.0, -2.0], metadata={"round_number": 1}),
            sample(1, 3, 0.0, 3, rollout_log_probs=[-1.0] * 3, train_metadata={"x": 1}),
        ],
        [replayed(2, 4)],
    ]
    groups[1][0].rollout_log_probs = [-1.0, -1.0]
    groups[0][1].weight_version_spans = [VersionSpan("1", 0, 2), VersionSpan("2", 2, 3)]
    batch = build_rollout_batch(batch_args(), 2, groups)
    again = batch_from_columns(2, batch_to_columns(batch), batch.group_ids)
    assert batch_to_columns(again).keys() == batch_to_columns(batch).keys()
    for name, column in batch_to_columns(batch).items():
        for a, b in zip(column, batch_to_columns(again)[name], strict=True):
            np.testing.assert_equal(a, b)


def test_spans_of_weight_versions() -> None:
    first, second = sample(0, 0, 1.0, 3), sample(1, 0, 0.0, 2)
    assert build_rollout_batch(batch_args(), 0, [[first, second]]).weight_version_spans is None
    first.weight_version_spans = [VersionSpan("1", 0, 2), VersionSpan("2", 2, 3)]
    # A user's function that shortened the response leaves the column to be shortened here.
    second.weight_version_spans = [VersionSpan("1", 1, 5), VersionSpan("2", 5, 6)]
    spans = build_rollout_batch(batch_args(), 0, [[first, second]]).weight_version_spans
    assert spans == [(VersionSpan("1", 0, 2), VersionSpan("2", 2, 3)), (VersionSpan("1", 1, 2),)]


def test_unused_ids() -> None:
    assert fill_missing_ids([None, 4, None, 0]) == [5, 4, 6, 0]


def test_a_failed_sample_moves_no_baseline() -> None:
    group = [sample(0, 0, 1.0), sample(1, 0, 0.0), sample(2, 0, 0.0, remove_sample=True)]
    group[2].status = Status.FAILED
    batch = build_rollout_batch(batch_args(), 0, [group])
    assert batch.rewards == [0.5, -0.5, 0.0]
    assert batch.loss_masks[2].sum() == 0


def test_failed_samples_are_marked() -> None:
    groups = [[sample(0, 0, 1.0), sample(1, 0, 0.0)], [sample(2, 1, 1.0), sample(3, 1, 0.5)]]
    assert "failed" not in build_rollout_batch(batch_args(), 0, groups).extra
    groups[0][1].status = Status.FAILED
    assert build_rollout_batch(batch_args(), 0, groups).extra["failed"] == [False, True, False, False]


def test_an_empty_response_has_empty_columns() -> None:
    empty = sample(1, 0, 0.0, length=0)
    batch = build_rollout_batch(batch_args(), 0, [[sample(0, 0, 1.0, rollout_log_probs=[-1.0] * 3), empty]])
    assert batch.response_lengths == [3, 0]
    assert batch.tokens[1].tolist() == [1, 2]
    assert batch.loss_masks[1].shape == (0,)
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs[1].shape == (0,)
    assert batch.rollout_mask_sums == [3.0, 0.0]
    assert batch.rewards == [0.5, -0.5]
