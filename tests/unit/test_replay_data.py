"""Kept token sets and routes stay aligned with the tokens, whatever is appended in whatever order."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.replay_data import UNROUTED, check_kept_tokens, num_routed, splice_routes
from slime.types import Sample

ARGS = SimpleNamespace(sglang_speculative_algorithm=None, num_layers=2, moe_router_topk=3)


def routes(start: int, end: int) -> Any:
    """Rows ``[start, end)`` that name their position."""
    return np.broadcast_to(np.arange(start, end, dtype=np.int32)[:, None, None], (end - start, 2, 3))


@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=6), st.data())
def test_spans_in_any_order(prompt: int, spans: list[tuple[bool, int]], data: st.DataObject) -> None:
    sample = Sample(tokens=list(range(prompt)))
    expected: list[list[int]] = []
    routed = 0
    for generated, count in spans:
        ids = [100 + len(expected) + i for i in range(count)]
        if not generated:
            sample.append_response_tokens(ARGS, tokens=ids, trainable=False)
            expected += [[]] * count
            continue
        sets = [[i, *data.draw(st.lists(st.integers(0, 9), max_size=3))] for i in ids]
        expected += sets
        start, end = num_routed(sample.rollout_routed_experts), len(sample.tokens) + count - 1
        assert start == routed
        meta = {
            "top_p_token_ids": [i for row in sets for i in row],
            "top_p_token_offsets": np.cumsum([0, *(len(row) for row in sets)]),
            "routed_experts": routes(start, end),
            "routed_experts_start_len": start,
        }
        sample.append_response_tokens(ARGS, tokens=ids, log_probs=[-1.0] * count, meta_info=meta)
        routed = max(end, 0)
    if sample.rollout_top_p_token_offsets is not None:
        assert sample.rollout_top_p_token_ids is not None
        cuts = sample.rollout_top_p_token_offsets.tolist()
        found = [sample.rollout_top_p_token_ids[a:b].tolist() for a, b in itertools.pairwise(cuts)]
        assert found == expected
    if sample.rollout_routed_experts is not None:
        assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
        np.testing.assert_array_equal(sample.rollout_routed_experts[:routed], routes(0, routed))
        assert (sample.rollout_routed_experts[routed:] == UNROUTED).all()


def test_flat_routes_are_shaped_by_the_model() -> None:
    flat = routes(0, 3).tobytes()
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(ARGS, tokens=[3, 4], log_probs=[-1, -1], meta_info={"routed_experts": flat})
    np.testing.assert_array_equal(sample.rollout_routed_experts, routes(0, 3))


@pytest.mark.parametrize(
    ("start", "rows", "text"),
    [
        (0, 4, "4 rows from token 0 on, of 4 tokens"),
        (2, 1, "only the first 1 are known"),
        (1, 1, "1 rows from token 1"),
    ],
)
def test_routes_must_reach_the_end(start: int, rows: int, text: str) -> None:
    meta = {"routed_experts": routes(0, rows), "routed_experts_start_len": start}
    with pytest.raises(ValueError, match=text):
        splice_routes(np.array(routes(0, 1)), num_tokens=4, meta_info=meta, args=ARGS)


@pytest.mark.parametrize(
    ("ids", "offsets", "text"),
    [
        ([5, 6], [0, 1, 2], None),
        ([9, 5], [0, 2, 2], None),
        ([], [0, 0, 0], None),
        ([5, 6], [0, 2], "must be 3 that rise from 0 to 2; found 2"),
        ([5, 6], [0, 3, 2], "offsets must be 3"),
        ([5, 6], [1, 1, 2], "offsets must be 3"),
        ([5], [0, 1, 2], "must be 3 that rise from 0 to 1"),
        ([5, 5], [0, 1, 2], "kept set of response token 1 lacks the drawn token 6"),
        ([6, 6], [0, 1, 2], "kept set of response token 0 lacks the drawn token 5"),
    ],
)
def test_kept_sets_hold_the_drawn_token(ids: list[int], offsets: list[int], text: str | None) -> None:
    columns = [np.array(values, dtype=np.int32) for values in (ids, offsets, [5, 6])]
    if text is None:
        check_kept_tokens(*columns)
        return
    with pytest.raises(ValueError, match=text):
        check_kept_tokens(*columns)
