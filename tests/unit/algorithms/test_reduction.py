"""Token reduction and whitening: independence of the split, and deafness to masked values."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from slime.algorithms.reduction import TokenReducer, blank_masked, segment_means, segment_sums, spread, whiten

LENGTHS = [3, 0, 1, 4]
INF, NAN = float("inf"), float("nan")


def test_segments() -> None:
    x = torch.arange(8.0)
    assert segment_sums(x, LENGTHS).tolist() == [3, 0, 3, 22]
    mask = torch.tensor([1.0, 0, 1, 0, 1, 1, 0, 0])
    assert segment_means(x, mask, LENGTHS).tolist() == [1, 0, 0, 4.5]
    assert spread(torch.tensor([1.0, 2, 3, 4]), LENGTHS).tolist() == [1, 1, 1, 3, 4, 4, 4, 4]
    assert segment_sums(torch.zeros(0), []).shape == (0,)


def test_per_rollout_weighs_each_rollout_once() -> None:
    # Samples 0 and 1 are one rollout with 2 + 3 trained tokens, sample 2 is another with 1.
    x = torch.tensor([1.0, 2, 10, 20, 30, 7, 100])
    mask = torch.tensor([1.0, 1, 1, 1, 1, 1, 0])
    whole = TokenReducer.per_rollout(mask, [5, 5, 1], [2, 3, 2])(x)
    assert whole.item() == pytest.approx((1 + 2 + 10 + 20 + 30) / 5 + 7)
    parts = TokenReducer.per_rollout(mask[:2], [5], [2])(x[:2]) + TokenReducer.per_rollout(mask[2:], [5, 1], [3, 2])(
        x[2:]
    )
    assert parts.item() == pytest.approx(whole.item())


def test_a_fully_masked_rollout_adds_nothing() -> None:
    assert TokenReducer.per_rollout(torch.zeros(2), [0], [2])(torch.ones(2)).item() == 0


def test_per_token_and_replaced_masks() -> None:
    x, mask = torch.tensor([1.0, 2, 4]), torch.tensor([1.0, 1, 0])
    assert TokenReducer.per_token(mask)(x).item() == 3
    kept = TokenReducer.per_rollout(mask, [2], [3]).with_mask(torch.tensor([0.0, 1, 0]))
    assert kept(x).item() == 1  # the denominator stays 2


@pytest.mark.parametrize("poison", [INF, -INF, NAN])
def test_masked_poison_reaches_neither_value_nor_gradient(poison: float) -> None:
    x = torch.tensor([1.0, poison, 3.0], requires_grad=True)
    mask = torch.tensor([1.0, 0, 1])
    value = TokenReducer.per_rollout(mask, [2], [3])(blank_masked(x, mask).exp())
    value.backward()
    assert torch.isfinite(value)
    assert x.grad is not None
    assert x.grad[1] == 0
    assert torch.isfinite(x.grad).all()


def reference_whiten(flat: Tensor, mask: Tensor) -> Tensor:
    chosen = flat[mask.bool()].double()
    return (flat.double() - chosen.mean()) / torch.sqrt(chosen.var() + 1e-8)


def test_whitening_equals_the_formula_and_forgets_the_split() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, generator=generator) + 1000 for n in (4, 1, 6)]
    masks = [(torch.rand(len(r), generator=generator) > 0.3).float() for r in rows]
    want = reference_whiten(torch.cat(rows), torch.cat(masks))
    torch.testing.assert_close(torch.cat(whiten(rows, masks)).double(), want, atol=1e-4, rtol=1e-4)

    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = [(rows[:1], masks[:1]), (rows[1:], masks[1:])]
        parts = list(pool.map(lambda rank: whiten(*rank, all_reduce=meeting.all_reduce), ranks))
    torch.testing.assert_close(torch.cat([*parts[0], *parts[1]]).double(), want, atol=1e-4, rtol=1e-4)


class Meeting:
    """Sums tensors over threads, as a collective sums them over ranks."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=10)
        self._lock = threading.Lock()
        self._total: Tensor | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._barrier.wait() == 0:
            self._total = None
        self._barrier.wait()
        with self._lock:
            self._total = x if self._total is None else self._total + x
        self._barrier.wait()
        assert self._total is not None
        return self._total


def test_whitening_survives_masked_poison_and_a_rank_without_samples() -> None:
    got = whiten([torch.tensor([1.0, INF, 3.0])], [torch.tensor([1.0, 0, 1])])
    assert torch.isfinite(got[0]).all()
    assert got[0][[0, 2]].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    assert whiten([], []) == []
