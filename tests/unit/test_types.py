"""Samples keep their columns aligned; batches refuse columns that are not."""

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.types import PrefixCacheInfo, RolloutBatch, Sample, SpecInfo, Status
from slime.version_spans import VersionSpan

ARGS = SimpleNamespace(sglang_speculative_algorithm=None)


def int32(values: list[int]) -> Any:
    return np.array(values, dtype=np.int32)


def prompted(**fields: Any) -> Sample:
    return Sample(tokens=[1, 2], **fields)


def test_dict_round_trip_keeps_everything() -> None:
    sample = Sample(
        index=1,
        prompt=[{"role": "user", "content": "q"}],
        tokens=[1, 2, 3],
        response_length=1,
        status=Status.ABORTED,
        spec_info=SpecInfo(spec_accept_token_num=3),
        prefix_cache_info=PrefixCacheInfo(cached_tokens=2),
        weight_version_spans=[VersionSpan("1", 0, 1)],
        rollout_routed_experts=np.ones((2, 1, 1), dtype=np.int32),
    )
    sample.custom = {"a": 1}  # type: ignore[attr-defined]
    data = sample.to_dict()
    assert data["status"] == "aborted"
    assert data["spec_info"]["spec_accept_token_num"] == 3
    frozen = dict(data)
    again = Sample.from_dict(data)
    assert data == frozen
    assert again.status is Status.ABORTED
    assert data["weight_version_spans"] == [{"version": "1", "start": 0, "end": 1}]
    assert again.weight_version_spans == [VersionSpan("1", 0, 1)]
    assert vars(again)["custom"] == {"a": 1}
    np.testing.assert_equal(again.to_dict(), data)


def test_names_on_the_class() -> None:
    assert Sample.Status("truncated") is Status.TRUNCATED
    assert {s.value for s in Status} == {"pending", "completed", "truncated", "aborted", "failed"}
    assert Sample().status is Status.PENDING


def test_reward_value() -> None:
    assert Sample(reward=2.0).get_reward_value(SimpleNamespace(reward_key=None)) == 2.0
    assert Sample(reward={"score": 3.0}).get_reward_value(SimpleNamespace(reward_key="score")) == 3.0


def test_effective_length() -> None:
    assert Sample(response_length=4).effective_response_length == 4
    assert Sample(response_length=4, loss_mask=[1, 0, 0, 1]).effective_response_length == 2


def test_rates() -> None:
    info = SpecInfo()
    assert (info.spec_accept_rate, info.spec_accept_length) == (0.0, 0.0)
    info.add({"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2, "completion_tokens": 6})
    assert (info.spec_accept_rate, info.spec_accept_length) == (0.75, 3.0)
    cache = PrefixCacheInfo()
    assert cache.prefix_cache_hit_rate == 0.0
    cache.add({"cached_tokens": 1, "prompt_tokens": 4})
    assert cache.prefix_cache_hit_rate == 0.25


def test_turns_of_model_and_environment() -> None:
    sample = prompted()
    sample.append_response_tokens(ARGS, tokens=[3, 4], log_probs=[-1, -2], text="ab")
    sample.append_response_tokens(ARGS, tokens=[5], trainable=False, text="c")
    sample.append_response_tokens(ARGS, tokens=[6], log_probs=[-3], text="d")
    assert sample.tokens == [1, 2, 3, 4, 5, 6]
    assert (sample.response, sample.response_length) == ("abcd", 4)
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0, -3.0]


def test_mask_of_an_earlier_response_is_filled_in() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0, -1.0])
    sample.append_response_tokens(ARGS, tokens=[4], log_probs=[-2.0])
    assert sample.loss_mask == [1, 1, 1]
    other = Sample(tokens=[1, 2, 3], response_length=2)
    other.append_response_tokens(ARGS, tokens=[4], trainable=False)
    assert (other.loss_mask, other.rollout_log_probs) == ([1, 1, 0], [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("sample", "call", "text"),
    [
        (prompted(), {"tokens": [3], "log_probs": [-1, -2]}, "1 tokens come with 2 log-probs"),
        (prompted(), {"tokens": [3]}, "need log_probs"),
        (prompted(), {"tokens": [3], "log_probs": [-1], "trainable": False}, "carry no log_probs"),
        (Sample(tokens=[1, 2], response_length=1), {"tokens": [3], "log_probs": [-1]}, "have no log-probs"),
        (
            Sample(tokens=[1, 2], response_length=1, loss_mask=[]),
            {"tokens": [3], "trainable": False},
            "loss_mask has 1",
        ),
    ],
)
def test_refused_appends(sample: Sample, call: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sample.append_response_tokens(ARGS, **call)


def test_text_without_tokens() -> None:
    sample = prompted()
    sample.append_response_tokens(ARGS, tokens=[], text="note")
    assert (sample.response, sample.response_length, sample.loss_mask) == ("note", 0, None)


@pytest.mark.parametrize(
    ("reason", "status"),
    [("length", Status.TRUNCATED), ("abort", Status.ABORTED), ("stop", Status.COMPLETED), ("other", Status.PENDING)],
)
def test_finish_reasons(reason: str, status: Status) -> None:
    sample = prompted()
    meta = {"finish_reason": {"type": reason}, "weight_version": 3, "cached_tokens": 1, "prompt_tokens": 2}
    sample.append_response_tokens(ARGS, tokens=[3], log_probs=[-1], meta_info=meta)
    assert sample.status is status
    assert sample.weight_versions == ["3"]
    assert sample.prefix_cache_info == PrefixCacheInfo(cached_tokens=1, total_prompt_tokens=2)
    quiet = prompted()
    quiet.append_response_tokens(ARGS, tokens=[3], log_probs=[-1], meta_info=meta, update_terminal_info=False)
    assert (quiet.status, quiet.weight_versions) == (Status.PENDING, [])


def test_spans_of_weight_versions_follow_the_response() -> None:
    def reply(*rows: tuple[str, int, int]) -> dict[str, object]:
        spans = [{"version": v, "start": a, "end": b} for v, a, b in rows]
        return {"weight_versions": spans, "weight_version": rows[-1][0]}

    sample = prompted()
    sample.append_response_tokens(ARGS, tokens=[3, 4], log_probs=[-1, -1], meta_info=reply(("1", 0, 1), ("2", 1, 2)))
    sample.append_response_tokens(ARGS, tokens=[5], log_probs=[-1], meta_info=reply(("2", 0, 1)))
    sample.append_response_tokens(ARGS, tokens=[6, 7], trainable=False)
    sample.append_response_tokens(ARGS, tokens=[8], log_probs=[-1], meta_info={"weight_version": "2"})
    assert sample.weight_version_spans == [VersionSpan("1", 0, 1), VersionSpan("2", 1, 3), VersionSpan("2", 5, 6)]
    assert sample.weight_versions == ["1", "2", "2", "2"]
    # A user's function that starts again need not know of the spans.
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [1, 2], 0, [], []
    sample.append_response_tokens(ARGS, tokens=[9], log_probs=[-1], meta_info={"weight_version": "3"})
    assert sample.weight_version_spans == [VersionSpan("3", 0, 1)]


def test_speculation_is_counted_only_when_it_is_on() -> None:
    meta = {"spec_verify_ct": 2, "completion_tokens": 5}
    for algorithm, verified in ((None, 0), ("EAGLE", 2)):
        sample = prompted()
        args = SimpleNamespace(sglang_speculative_algorithm=algorithm)
        sample.append_response_tokens(args, tokens=[3], log_probs=[-1], meta_info=meta)
        assert sample.spec_info.spec_verify_ct == verified


@pytest.mark.parametrize(
    "encode", [list, lambda v: int32(v).tobytes(), lambda v: base64.b64encode(int32(v).tobytes()).decode()]
)
@pytest.mark.parametrize("prefix", ["top_p_token", "top_p_kept_token"])
def test_top_p_sets_are_merged(encode: Any, prefix: str) -> None:
    sample = prompted()

    def meta(ids: list[int], offsets: list[int]) -> dict[str, Any]:
        names = (f"{prefix}_ids", f"{prefix}_offsets")
        return dict(zip(names, (encode(ids), encode(offsets)), strict=True))

    sample.append_response_tokens(ARGS, tokens=[3, 4], log_probs=[-1, -1], meta_info=meta([3, 9, 4], [0, 2, 3]))
    sample.append_response_tokens(ARGS, tokens=[5], trainable=False)
    sample.append_response_tokens(ARGS, tokens=[6], log_probs=[-1], meta_info=meta([6, 7], [0, 2]))
    assert sample.rollout_top_p_token_ids is not None
    assert sample.rollout_top_p_token_offsets is not None
    assert sample.rollout_top_p_token_ids.tolist() == [3, 9, 4, 6, 7]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 3, 5]


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 1], [0, 2, 2]])
def test_top_p_offsets_must_fit(offsets: list[int]) -> None:
    meta = {"top_p_token_ids": [3, 4], "top_p_token_offsets": offsets}
    with pytest.raises(ValueError, match="top-p"):
        prompted().append_response_tokens(ARGS, tokens=[3], log_probs=[-1], meta_info=meta)


@pytest.mark.parametrize("name", ["top_p_token_ids", "top_p_token_offsets"])
def test_top_p_columns_come_together(name: str) -> None:
    with pytest.raises(ValueError, match="together"):
        prompted().append_response_tokens(ARGS, tokens=[3], log_probs=[-1], meta_info={name: [0, 1]})


def test_routed_experts_are_replaced_or_spliced() -> None:
    rows = np.arange(12, dtype=np.int64).reshape(6, 2, 1)
    sample = prompted()
    sample.append_response_tokens(ARGS, tokens=[3, 4], log_probs=[-1, -1], meta_info={"routed_experts": rows[:3]})
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.dtype == np.int32
    tail = {"routed_experts": rows[3:5] + 100, "routed_experts_start_len": 3}
    sample.append_response_tokens(ARGS, tokens=[5, 6], log_probs=[-1, -1], meta_info=tail)
    np.testing.assert_array_equal(sample.rollout_routed_experts, np.concatenate([rows[:3], rows[3:5] + 100]))
    with pytest.raises(ValueError, match="routed experts have 2 rows from token 0 on, of 8 tokens"):
        sample.append_response_tokens(ARGS, tokens=[7, 8], log_probs=[-1, -1], meta_info={"routed_experts": rows[:2]})


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=6))
def test_columns_stay_aligned(turns: list[tuple[bool, int]]) -> None:
    sample = prompted()
    for trainable, count in turns:
        log_probs = [-1.0] * count if trainable else None
        sample.append_response_tokens(ARGS, tokens=[5] * count, log_probs=log_probs, trainable=trainable or count == 0)
    total = sum(count for _, count in turns)
    assert sample.response_length == total
    assert len(sample.tokens) == total + 2
    assert sample.effective_response_length == sum(count for trainable, count in turns if trainable)
    sample.check_alignment()


def batch(**changes: Any) -> RolloutBatch:
    values: dict[str, Any] = {
        "rollout_id": 0,
        "tokens": [int32([1, 2, 3]), int32([1, 2])],
        "response_lengths": [2, 1],
        "loss_masks": [np.ones(2, np.float32), np.ones(1, np.float32)],
        "rewards": [1.0, 0.0],
        "raw_rewards": [1.0, 0.0],
        "truncated": [False, False],
        "sample_indices": [0, 1],
        "group_ids": [0, 0],
        "rollout_ids": [0, 1],
        "rollout_mask_sums": [2.0, 1.0],
        "weight_versions": [("1",), ("1",)],
    }
    return RolloutBatch(**{**values, **changes})


def test_batch() -> None:
    assert len(batch()) == 2
    assert batch().total_lengths == [3, 2]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rewards": [1.0]}, "column rewards has 1 entries, tokens has 2"),
        ({"extra": {"mine": [1]}}, "extra column mine has 1"),
        ({"metadata": [None]}, "column metadata has 1"),
        ({"loss_masks": [np.ones(2, np.float32)] * 2}, r"loss_masks\[1\] has 2 entries, response_lengths\[1\] is 1"),
        ({"rollout_log_probs": [np.ones(1, np.float32)] * 2}, r"rollout_log_probs\[0\] has 1 entries"),
        (
            {"weight_version_spans": [(), (VersionSpan("1", 0, 2),)]},
            r"spans\[1\]: .*response of 1 tokens",
        ),
        ({"weight_version_spans": [()]}, "column weight_version_spans has 1"),
        ({"rollout_top_p_token_ids": [int32([2, 3]), int32([2])]}, "come together or not at all"),
        (
            {
                "rollout_top_p_token_ids": [int32([2, 3]), int32([1])],
                "rollout_top_p_token_offsets": [int32([0, 1, 2]), int32([0, 1])],
            },
            r"rollout_top_p_token_ids\[1\]: the kept set of response token 0 lacks the drawn token 2",
        ),
        ({"rollout_routed_experts": [np.zeros((2, 2, 1))] * 2}, r"rollout_routed_experts\[1\] has shape \[2, 2, 1\]"),
        ({"rollout_routed_experts": [np.zeros((2, 2)), np.zeros((1, 2))]}, r"\[0\] has shape \[2, 2\]"),
    ],
)
def test_batch_refuses_unequal_columns(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        batch(**changes)
