"""Packed layouts: what is visible to what, positions, shares of context-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron.layout import PackedLayout, Segment, context_parallel_index

groups_strategy = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), max_size=4)), min_size=1, max_size=4
)


@settings(max_examples=40)
@given(groups=groups_strategy, multiple=st.sampled_from([1, 4, 8]))
def test_visible_is_the_definition_token_by_token(groups: list[tuple[int, list[int]]], multiple: int) -> None:
    layout = PackedLayout.of_groups(groups, multiple=multiple)
    owner: list[tuple[int, int | None]] = []  # prompt, response (None: token of the prompt)
    positions = []
    for g, (prompt, responses) in enumerate(groups):
        owner += [(g, None)] * prompt
        positions += range(prompt)
        for r, length in enumerate(responses):
            owner += [(g, r)] * length
            positions += range(prompt, prompt + length)
    visible = layout.visible()
    for i, (group, response) in enumerate(owner):
        for j, (other_group, other_response) in enumerate(owner):
            expected = group == other_group and j <= i and other_response in (None, response)
            assert visible[i, j] == expected
    real = len(owner)
    assert layout.num_tokens % multiple == 0
    assert 0 <= layout.num_tokens - real < multiple
    assert not visible[real:].any()
    assert not visible[:, real:].any()
    assert layout.positions()[:real].tolist() == positions
    assert layout.num_attended == int(visible.sum())


def test_prefixes_of_prefixes() -> None:
    layout = PackedLayout((Segment(0, 2), Segment(2, 1, 2, 0), Segment(3, 2, 3, 1), Segment(5, 1, 2, 0)), 6)
    assert layout.chain(2) == (0, 1, 2)
    assert layout.visible()[4].tolist() == [True, True, True, True, True, False]
    assert layout.visible()[5].tolist() == [True, True, False, False, False, True]


def test_predictors_start_at_the_end_of_the_prompt() -> None:
    layout = PackedLayout.of_groups([(3, [2, 3])])
    assert layout.predictors(1).tolist() == [2, 3]
    assert layout.predictors(2).tolist() == [2, 5, 6]
    with pytest.raises(ValueError, match="no prefix"):
        layout.predictors(0)


@pytest.mark.parametrize(
    ("segments", "num_tokens"),
    [
        ((Segment(0, 3), Segment(2, 2)), 8),
        ((Segment(0, 3),), 2),
        ((Segment(0, 3, prefix=0),), 3),
        ((Segment(0, 1, prefix=1), Segment(1, 1)), 2),
    ],
)
def test_impossible_layouts_are_refused(segments: tuple[Segment, ...], num_tokens: int) -> None:
    with pytest.raises(ValueError, match="segment"):
        PackedLayout(segments, num_tokens)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_context_parallel_ranks_share_a_row(cp_size: int) -> None:
    parts = [context_parallel_index(16, rank, cp_size) for rank in range(cp_size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(16))
    assert {part.numel() for part in parts} == {16 // cp_size}
    if cp_size == 2:
        assert parts[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


def test_a_row_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="pad to 4"):
        context_parallel_index(10, 0, 2)
