"""Padded attention batches against one SDPA call with the full mask, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron.layout import PackedLayout, Segment
from slime.backends.megatron.padded import PaddedPlan

groups_strategy = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), max_size=4)), min_size=1, max_size=4
)


def reference(layout: PackedLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The definition in float64, head by head."""
    mask = layout.visible()
    repeats = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v.double())


def check(layout: PackedLayout) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, 8))
    q, k, v = (torch.randn(layout.num_tokens, *s, generator=generator).requires_grad_() for s in shapes)
    real = layout.segment_ids() >= 0
    upstream = torch.randn(layout.num_tokens, 4, 8, generator=generator)
    plan = PaddedPlan(layout, dtype=torch.float32, device=torch.device("cpu"))
    output = plan.attend(q, k, v, scale=0.3)
    grads = torch.autograd.grad(output, (q, k, v), upstream)
    expected = reference(layout, q, k, v, 0.3)
    expected_grads = torch.autograd.grad(expected, (q, k, v), upstream.double() * real[:, None, None])
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@settings(max_examples=12)
@given(groups=groups_strategy, multiple=st.sampled_from([1, 16]))
def test_shared_prompts(groups: list[tuple[int, list[int]]], multiple: int) -> None:
    check(PackedLayout.of_groups(groups, multiple=multiple))


@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=8))
def test_independent_sequences(lengths: list[int]) -> None:
    check(PackedLayout.of_sequences(lengths, multiple=8))


def test_prefixes_of_prefixes_and_gaps() -> None:
    check(PackedLayout((Segment(1, 5), Segment(6, 3, 5, 0), Segment(10, 4, 8, 1), Segment(14, 2, 5, 0)), 17))


def test_equal_sequences_are_one_call_without_copies() -> None:
    plan = PaddedPlan(PackedLayout.of_sequences([9] * 7), dtype=torch.float32, device=torch.device("cpu"))
    assert plan.slots.identity
    assert [(batch.size, batch.length, batch.bias) for batch in plan.batches] == [(7, 9, None)]


def test_equal_groups_share_one_mask() -> None:
    plan = PaddedPlan(PackedLayout.of_groups([(5, [7] * 4)] * 3), dtype=torch.float32, device=torch.device("cpu"))
    assert [(batch.size, batch.length) for batch in plan.batches] == [(3, 5), (12, 7)]
    assert plan.batches[1].bias is not None
    assert plan.batches[1].bias.shape == (1, 1, 7, 12)


def test_a_row_of_padding_only() -> None:
    plan = PaddedPlan(PackedLayout((), 4), dtype=torch.float32, device=torch.device("cpu"))
    q = torch.randn(4, 2, 8, requires_grad=True)
    output = plan.attend(q, q[:, :1], q[:, :1], scale=1.0)
    assert torch.equal(output, torch.zeros(4, 2, 8))
    output.sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    layout = PackedLayout.of_groups([(30, [40, 11])])
    q, k, v = (torch.randn(layout.num_tokens, h, 16, dtype=dtype) for h in (4, 2, 2))
    plan = PaddedPlan(layout, dtype=dtype, device=torch.device("cpu"))
    found = plan.attend(q, k, v, scale=0.25)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), reference(layout, q, k, v, 0.25), rtol=0, atol=2e-2)


def test_large_scores_do_not_leak_through_padding() -> None:
    layout = PackedLayout.of_groups([(3, [5]), (9, [5])])
    q = torch.full((layout.num_tokens, 1, 8), 30.0)
    v = torch.ones_like(q)
    plan = PaddedPlan(layout, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(plan.attend(q, -q, v, scale=1.0), v)
