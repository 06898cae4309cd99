"""Packing: established vectors, and properties that hold for any lengths."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.data.packing import (
    Balance,
    DPSchedule,
    Lengths,
    PackingSettings,
    balanced_partitions,
    build_dp_schedule,
    consecutive,
    first_fit,
    repack,
    sequence_costs,
)
from slime.errors import ConfigError


def plain(total: list[int]) -> Lengths:
    return Lengths(total=total)


@pytest.mark.parametrize(
    ("total", "cap", "expected"),
    [
        ([100, 200, 300], 300, [[0, 1], [2]]),
        ([5, 9, 3, 4, 12, 2], 10, [[0, 2, 5], [1], [3], [4]]),
    ],
)
def test_first_fit_vectors(total: list[int], cap: int, expected: list[list[int]]) -> None:
    assert first_fit(range(len(total)), plain(total), cap) == expected


@pytest.mark.parametrize(
    ("weights", "equal_size", "expected"),
    [
        ([9, 1, 7, 3], True, [[2, 3], [0, 1]]),
        ([9, 1, 7, 3, 4], False, [[1, 2, 4], [0, 3]]),
    ],
)
def test_balanced_partition_vectors(weights: list[float], equal_size: bool, expected: list[list[int]]) -> None:
    assert balanced_partitions(weights, 2, equal_size=equal_size) == expected


def test_static_schedule_is_strided_over_ranks() -> None:
    schedule = build_dp_schedule(
        range(8), plain([10] * 8), PackingSettings(global_batch_size=8, dp_size=2, micro_batch_size=2)
    )
    assert [schedule.rank_samples(r) for r in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert schedule.steps[0].num_micro_batches == 2


def test_dynamic_schedule_splits_the_largest_to_even_out_ranks() -> None:
    schedule = build_dp_schedule(
        range(6), plain([60, 30, 50, 40, 90, 10]), PackingSettings(global_batch_size=6, dp_size=2, max_tokens=100)
    )
    assert [schedule.rank_samples(r) for r in range(2)] == [[0, 4], [2, 3, 1, 5]]
    assert schedule.rank_micro_batches(0) == [[[0], [1]]]
    assert schedule.rank_micro_batches(1) == [[[0, 1], [2, 3]]]


def test_incomplete_trailing_step_is_dropped_and_counted() -> None:
    schedule = build_dp_schedule(
        [0, 0, 1, 2, 2],
        plain([60, 30, 50, 20, 20]),
        PackingSettings(global_batch_size=2, dp_size=1, max_tokens=100),
    )
    assert schedule.rank_samples(0) == [0, 1, 2]
    assert schedule.rank_micro_batches(0) == [[[0, 1], [2]]]
    assert schedule.num_dropped_samples == 2


@pytest.mark.parametrize(
    ("ids", "gbs", "dp", "names"),
    [([0, 1], 3, 1, "--global-batch-size"), ([0, 1], 1, 2, "data-parallel")],
)
def test_too_few_samples_name_the_flag(ids: list[int], gbs: int, dp: int, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        build_dp_schedule(ids, plain([1] * len(ids)), PackingSettings(global_batch_size=gbs, dp_size=dp))


def test_shared_prompts_cost_once_and_groups_stay_together() -> None:
    lengths = Lengths(total=[43 + 5] * 16, prompt=[43] * 16, prompt_keys=[i // 8 for i in range(16)])
    assert lengths.tokens(range(8)) == 43 + 8 * 5
    assert first_fit(range(16), lengths, 90) == [list(range(8)), list(range(8, 16))]
    interleaved = Lengths(total=[48] * 16, prompt=[43] * 16, prompt_keys=[i % 2 for i in range(16)])
    assert first_fit(range(16), interleaved, 90) == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_a_group_larger_than_the_cap_is_split_into_shared_parts() -> None:
    lengths = Lengths(total=[40 + 20] * 6, prompt=[40] * 6, prompt_keys=[0] * 6)
    bins = first_fit(range(6), lengths, 100)
    assert bins == [[0, 1, 2], [3, 4, 5]]
    assert [lengths.tokens(b) for b in bins] == [100, 100]


def test_too_few_samples_for_equal_counts_give_empty_micro_batches() -> None:
    schedule = build_dp_schedule(range(3), plain([9, 9, 9]), PackingSettings(global_batch_size=3, dp_size=2))
    assert schedule.steps[0].micro_batches == (((0,), (2,)), ((1,), ()))


def test_sequence_costs_count_causal_pairs() -> None:
    assert sequence_costs([1, 3], per_token=10, per_token_pair=2) == [12, 42]


samples_strategy = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 40)), min_size=1)


def schedule_for(
    rows: list[tuple[int, int, int]], dp: int, gbs: int, cap: int | None, mbs: int, share: bool, balance: Balance
) -> tuple[DPSchedule, Lengths]:
    prompts = [r[1] for r in rows]
    totals = [r[1] + r[2] for r in rows]
    keys = [(r[0] // 2, r[1]) for r in rows] if share else None
    lengths = Lengths(total=totals, prompt=prompts, prompt_keys=keys)
    cut = PackingSettings(global_batch_size=gbs, dp_size=dp, micro_batch_size=mbs, max_tokens=cap, balance=balance)
    costs = sequence_costs(totals, per_token=1, per_token_pair=0.1)
    return build_dp_schedule([r[0] for r in rows], lengths, cut, costs), lengths


@settings(max_examples=200)
@given(
    rows=samples_strategy,
    dp=st.integers(1, 3),
    gbs=st.integers(1, 4),
    cap=st.one_of(st.none(), st.integers(1, 200)),
    mbs=st.integers(1, 4),
    share=st.booleans(),
    balance=st.sampled_from(["none", "tokens", "cost"]),
)
def test_every_sample_once_caps_hold_counts_equal(
    rows: list[tuple[int, int, int]],
    dp: int,
    gbs: int,
    cap: int | None,
    mbs: int,
    share: bool,
    balance: Balance,
) -> None:
    try:
        schedule, lengths = schedule_for(rows, dp, gbs, cap, mbs, share, balance)
    except ConfigError:
        ids = [r[0] for r in rows]
        sizes = [ids.count(i) for i in dict.fromkeys(ids)]
        steps = [sum(sizes[i : i + gbs]) for i in range(0, len(sizes) - gbs + 1, gbs)]
        assert not steps or min(steps) < dp
        return
    placed = [s for step in schedule.steps for rank in step.micro_batches for mb in rank for s in mb]
    assert sorted(placed) == sorted(s for step in schedule.steps for s in step.samples)
    assert len(placed) + schedule.num_dropped_samples == len(rows)
    for step in schedule.steps:
        assert len({rows[s][0] for s in step.samples}) == gbs == step.num_rollouts
        assert {len(rank) for rank in step.micro_batches} == {step.num_micro_batches}
        for mb in itertools.chain.from_iterable(step.micro_batches):
            assert len(mb) <= mbs if cap is None else len(mb) <= 1 or lengths.tokens(mb) <= cap
    repacked = repack(schedule, lengths, 70)
    assert {len(rank) for rank in repacked.steps[0].micro_batches} == {repacked.steps[0].num_micro_batches}
    for rank in range(dp):
        assert sorted(repacked.rank_samples(rank)) == sorted(schedule.rank_samples(rank))
        assert all(len(mb) <= 1 or lengths.tokens(mb) <= 70 for mb in repacked.steps[0].micro_batches[rank])


@settings(max_examples=100)
@given(st.lists(st.integers(1, 1000), min_size=4, max_size=24), st.integers(1, 4))
def test_balanced_partitions_are_partitions(weights: list[int], parts: int) -> None:
    whole = weights[: len(weights) // parts * parts]
    for equal, items in ((True, whole), (False, weights)):
        got = balanced_partitions(items, parts, equal_size=equal)
        assert sorted(itertools.chain.from_iterable(got)) == list(range(len(items)))
        if equal:
            assert {len(p) for p in got} == {len(items) // parts}


def test_consecutive_keeps_order() -> None:
    assert consecutive([4, 2, 7, 1, 0], 2) == [[4, 2], [7, 1], [0]]
