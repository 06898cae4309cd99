"""Radix prefix cache, slabs of rows, and attention over them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines.embedded.attention import DecodeAttention, attend
from slime.engines.embedded.cache import KvBudget, KvFullError, SlabPool
from slime.engines.embedded.kv import CacheShape, KvBlock
from slime.engines.embedded.prefix import PrefixCache, PrefixEntry
from slime.engines.embedded.shape import read_shape
from tests.support.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> CacheShape:
    return read_shape(make_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)).cache


def make_cache(shape: CacheShape, capacity: int = 10_000, **options: Any) -> PrefixCache:
    return PrefixCache(shape, dtype=torch.float32, device=CPU, budget=KvBudget(capacity), **options)


def put(cache: PrefixCache, tokens: list[int], *, in_use: bool = False, logits: bool = True) -> PrefixEntry:
    entry = cache.create(np.array(tokens, dtype=np.int32))
    entry.filled = len(tokens)
    entry.logits = torch.zeros(3) if logits else None
    cache.insert(entry)
    if not in_use:
        cache.release(entry)
    return entry


def find(cache: PrefixCache, tokens: list[int]) -> tuple[int, PrefixEntry | None]:
    return cache.find(np.array(tokens, dtype=np.int32))


def test_longest_match_is_found_even_inside_an_edge(shape: CacheShape) -> None:
    cache = make_cache(shape)
    abc = put(cache, [1, 2, 3])
    abcde = put(cache, [1, 2, 3, 4, 5])
    abx = put(cache, [1, 2, 9])
    assert find(cache, [1, 2, 3]) == (3, abc)
    assert find(cache, [1, 2, 3, 4]) == (4, abcde)
    assert find(cache, [1, 2, 9, 9]) == (3, abx)
    assert find(cache, [1, 2, 7])[0] == 2
    assert find(cache, [8]) == (0, None)


@settings(max_examples=60)
@given(
    kept=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12),
    asked=st.lists(st.integers(0, 2), min_size=1, max_size=10),
    evicted=st.integers(0, 30),
)
def test_match_equals_a_linear_search(shape: CacheShape, kept: list[list[int]], asked: list[int], evicted: int) -> None:
    cache = make_cache(shape)
    entries = [put(cache, tokens) for tokens in kept]
    cache.evict(evicted)
    left = [entry for entry in entries if entry.is_cached]
    matched, found = find(cache, asked)

    def common(entry: PrefixEntry) -> int:
        pairs = zip(entry.tokens.tolist(), asked, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(entry.tokens), len(asked)))

    assert matched == max((common(entry) for entry in left), default=0)
    if found is not None:
        assert found in left
        assert common(found) == matched
    assert cache._budget.used == sum(len(entry.tokens) for entry in left)


def test_eviction_takes_the_oldest_unused(shape: CacheShape) -> None:
    cache = make_cache(shape)
    used = put(cache, [1] * 10, in_use=True)
    old = put(cache, [2] * 10)
    new = put(cache, [3] * 10)
    find(cache, [2] * 10)
    assert cache.evict(5) == 10
    assert (used.is_cached, old.is_cached, new.is_cached) == (True, True, False)
    assert cache.evict(1000) == 10
    assert used.is_cached


def test_clear_forgets_but_lets_users_finish(shape: CacheShape) -> None:
    cache = make_cache(shape)
    used = put(cache, [1] * 10, in_use=True)
    put(cache, [2] * 10)
    cache.clear()
    assert find(cache, [1] * 10) == (0, None)
    assert cache._budget.used == 10
    cache.release(used)
    assert cache._budget.used == 0


def test_budget_is_never_exceeded(shape: CacheShape) -> None:
    cache = make_cache(shape, capacity=15)
    put(cache, [1] * 10)
    with pytest.raises(KvFullError, match="10 of 15"):
        cache.create(np.zeros(6, dtype=np.int32))


SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "scale": 0.25}
LAYOUTS = {
    "grouped": CacheShape(**SIZES, num_kv_heads=2, key_dim=16, value_dim=16),
    "one head": CacheShape(**SIZES, num_kv_heads=1, key_dim=16, value_dim=16),
    "latent": CacheShape(**SIZES, num_kv_heads=1, key_dim=24, value_dim=16, values_in_keys=True),
    "with experts": CacheShape(**SIZES, num_kv_heads=4, key_dim=8, value_dim=8, num_routes=3),
}


def fill(kv: KvBlock) -> KvBlock:
    """Random contents; returns a copy."""
    kv.k.normal_()
    if kv.own_v is not None:
        kv.own_v.normal_()
    if kv.routes is not None:
        kv.routes.random_(0, 100)
    return kv.clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_keep_their_contents_when_others_leave_or_they_grow(layout: str) -> None:
    pool = SlabPool(LAYOUTS[layout], dtype=torch.float32, device=CPU, budget=KvBudget(100_000))
    rows = [pool.add(50, 60) for _ in range(9)]
    contents = [fill(row.kv) for row in rows]
    for gone in (0, 5):
        pool.remove(rows[gone])
    rows[3].length = 64
    pool.make_room(rows[3])
    pool.free_unused()
    assert rows[3].slab.width == 128
    for i, row in enumerate(rows):
        if i not in (0, 5):
            held, expected = row.kv.span(0, 50), contents[i]
            assert torch.equal(held.k, expected.k)
            assert torch.equal(held.v, expected.v)
            assert held.routes is expected.routes is None or torch.equal(held.routes, expected.routes)
            assert row.slab.rows[row.index] is row
    assert pool._budget.used == sum(slab.tokens for slab in pool.slabs.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention_equals_plain_attention(layout: str, dtype: torch.dtype) -> None:
    """Rows of two slabs, with own, shared and differently shared prompts, against float64."""
    torch.manual_seed(0)
    shape = LAYOUTS[layout]
    budget = KvBudget(100_000)
    cache = PrefixCache(shape, dtype=dtype, device=CPU, budget=budget)
    pool = SlabPool(shape, dtype=dtype, device=CPU, budget=budget)
    entry = cache.create(np.arange(90, dtype=np.int32))
    fill(entry.kv)
    plan = [(10, None), (0, 90), (100, None), (7, 90), (80, 40), (0, 90)]
    for length, shared in plan:
        row = pool.add(length, length + 10)
        fill(row.kv)
        if shared is not None:
            row.shared, row.shared_length = entry, shared
    attention = DecodeAttention(list(pool.slabs.values()), shape)
    count, layer = len(plan), 1
    q = torch.randn(count, shape.num_heads, shape.key_dim).to(dtype)
    k = torch.randn(count, shape.num_kv_heads, shape.key_dim).to(dtype)
    v = k[..., : shape.value_dim] if shape.values_in_keys else torch.randn_like(k)
    out = attention(layer, q, k, v).view(count, shape.num_heads, shape.value_dim)
    for i, row in enumerate(attention.rows):
        held = row.slab.kv.row(row.index).span(0, row.length + 1)
        parts_k, parts_v = [held.k[layer]], [held.v[layer]]
        assert torch.equal(parts_k[0][:, -1], k[i])
        assert torch.equal(parts_v[0][:, -1], v[i])
        if row.shared is not None:
            shared = row.shared.kv.span(0, row.shared_length)
            parts_k.insert(0, shared.k[layer])
            parts_v.insert(0, shared.v[layer])
        keys, values = (torch.cat(p, 1).double().repeat_interleave(shape.heads_per_key, 0) for p in (parts_k, parts_v))
        weights = torch.softmax((keys @ q[i].double()[:, :, None])[:, :, 0] * shape.scale, -1)
        expected = (weights[:, None] @ values)[:, 0]
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(out[i].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_gives_the_log_sum_exp(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, n, 16).to(dtype) for n in (4, 9, 9))
    mask = torch.zeros(2, 1, 4, 9, dtype=dtype)
    mask[1, :, :, 6:] = float("-inf")
    out, lse = attend(q, k, v, mask, 0.25)
    scores = q.double() @ k.double().transpose(2, 3) * 0.25 + mask.double()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out.double(), torch.softmax(scores, -1) @ v.double(), atol=tolerance, rtol=tolerance)
