"""Variable-length attention where its kernel has nothing to do; the kernel itself is tested on a GPU."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron.layout import PackedLayout, Segment, context_parallel_index
from slime.backends.megatron.varlen import VarlenPlan


@pytest.mark.parametrize("width", [4, 6])
def test_a_rank_of_padding_takes_part_in_the_backward(width: int) -> None:
    layout = PackedLayout((Segment(0, 2, 0, None),), 8)
    places = [context_parallel_index(8, rank, 2) for rank in range(2)]
    plan = VarlenPlan(layout, places[1], torch.cat(places), device=torch.device("cpu"))
    query = torch.randn(4, 2, 6, requires_grad=True)
    key, value = torch.randn(8, 1, 6, requires_grad=True), torch.randn(8, 1, width, requires_grad=True)
    output = plan.attend(query, key, value, scale=1.0)
    assert output.shape == (4, 2, width)
    assert not output.any()
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    assert [bool(g.any()) for g in grads] == [False] * 3
