"""Restricted log-probs against a float64 log_softmax over masked logits: values, gradients, chunks, shards, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.megatron.kept_tokens import KeptTokens, check_kept_tokens, kept_tokens
from slime.backends.megatron.logprobs import score_tokens
from slime.backends.megatron.vocab_shard import VocabShard
from slime.errors import DataError
from slime.types import RolloutBatch
from tests.support.rollouts import make_rollout

VOCAB, PADDED = 37, 48
ROWS = torch.tensor([4, 0, 1, 2, 0, 3, 5, 5, 0, 2])
SETS = [(3, 9, 36), (), (5,), (0, 1, 2, 30), (7, 8), tuple(range(VOCAB)), (20, 21), (), (30, 2, 11, 36), ()]
"""Per target; several share a row, some restrict nothing, one keeps everything, one is unsorted."""
TARGETS = torch.tensor([9, 4, 5, 30, 8, 17, 3, 36, 11, 0])
"""The seventh is not in its set: a sampled token always counts as kept."""
TOLERANCE: dict[str, Any] = {"atol": 5e-6, "rtol": 1e-5}


def sets_of(rows: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    flat = [i for row in rows for i in row]
    return np.array(flat, dtype=np.int32), np.cumsum([0, *(len(row) for row in rows)])


def kept_sets() -> KeptTokens:
    return KeptTokens.of(*sets_of(SETS), TARGETS.numpy())


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, PADDED, generator=generator) * 4).to(dtype)
    weights = torch.randn(2, len(TARGETS), generator=generator, dtype=torch.float64)
    return logits, weights[0], weights[1]


def reference(logits: Tensor, temperature: float, weights: Tensor, entropy_weights: Tensor) -> tuple[Tensor, ...]:
    """Target by target in float64: everything outside the set is minus infinity; entropy of the whole row."""
    leaf = logits.double().requires_grad_()
    log_probs, entropies = [], []
    for target, row, kept in zip(TARGETS.tolist(), ROWS.tolist(), SETS, strict=True):
        x = leaf[row, :VOCAB] / temperature
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[[*kept, target] if kept else slice(None)] = True
        log_probs.append(torch.log_softmax(x.masked_fill(~mask, float("-inf")), -1)[target])
        whole = torch.log_softmax(x, -1)
        entropies.append(-(whole.exp() * whole).sum())
    found, entropy = torch.stack(log_probs), torch.stack(entropies)
    (found @ weights + entropy @ entropy_weights).backward()
    assert leaf.grad is not None
    return found.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("chunk_size", [-1, 1, 4])
@pytest.mark.parametrize(("temperature", "reuse_logits"), [(1.0, False), (0.7, True)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_masked_float64(
    chunk_size: int, temperature: float, reuse_logits: bool, with_entropy: bool
) -> None:
    logits, weights, entropy_weights = example()
    want = reference(logits, temperature, weights, entropy_weights * with_entropy)
    leaf = logits.clone().requires_grad_()
    scores = score_tokens(
        leaf * 1.0,
        TARGETS,
        VocabShard.of(VOCAB, PADDED),
        rows=ROWS,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        reuse_logits=reuse_logits,
        kept=kept_sets(),
    )
    loss = scores.log_probs @ weights.float()
    if with_entropy:
        assert scores.entropy is not None
        torch.testing.assert_close(scores.entropy.double(), want[1], **TOLERANCE)
        loss = loss + scores.entropy @ entropy_weights.float()
    loss.backward()
    torch.testing.assert_close(scores.log_probs.double(), want[0], **TOLERANCE)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), want[2], **TOLERANCE)
    assert not leaf.grad[:, VOCAB:].any()


def test_everything_kept_is_plain_and_one_kept_is_certain() -> None:
    logits, _, _ = example(torch.float64)
    shard, options = VocabShard.of(VOCAB, PADDED), {"rows": ROWS, "chunk_size": 2}
    everything = KeptTokens.of(*sets_of([tuple(range(VOCAB))] * len(TARGETS)), TARGETS.numpy())
    results = []
    for kept in (None, everything):
        leaf = logits.clone().requires_grad_()
        scores = score_tokens(leaf, TARGETS, shard, kept=kept, **options)
        scores.log_probs.square().sum().backward()
        results.append((scores.log_probs, leaf.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-12)
    leaf = logits.clone().requires_grad_()
    alone = KeptTokens.of(*sets_of([(int(t),) for t in TARGETS]), TARGETS.numpy())
    certain = score_tokens(leaf, TARGETS, shard, kept=alone, **options).log_probs
    certain.sum().backward()
    assert leaf.grad is not None
    assert not certain.any()
    assert not leaf.grad.any()


def test_large_logits_and_infinities_outside_the_set_do_not_poison() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([float("-inf"), 3e4, -2e4, -2e4 + 1])
    leaf = logits.requires_grad_()
    kept = KeptTokens.of(np.array([2, 3], dtype=np.int32), np.array([0, 2]), np.array([2]))
    scores = score_tokens(leaf * 1, torch.tensor([2]), VocabShard.of(VOCAB, VOCAB), kept=kept, with_entropy=True)
    scores.log_probs.sum().backward()
    assert leaf.grad is not None
    assert scores.log_probs.item() == pytest.approx(-float(np.log1p(np.e)), rel=1e-5)
    assert leaf.grad[0, 2:4].tolist() == pytest.approx([1 - 1 / (1 + np.e), -np.e / (1 + np.e)], rel=1e-3)
    assert not torch.cat([leaf.grad[0, :2], leaf.grad[0, 4:]]).any()


def test_parts_of_the_sets_score_like_the_whole() -> None:
    logits, _, _ = example()
    shard, kept = VocabShard.of(VOCAB, PADDED), kept_sets()
    whole = score_tokens(logits, TARGETS, shard, rows=ROWS, kept=kept).log_probs
    parts = [
        score_tokens(logits, t, shard, rows=r, kept=k).log_probs
        for t, r, k in zip(TARGETS.split(3), ROWS.split(3), kept.split(3), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=0)
    places = np.array([0, 2, 3, 7, 8])
    some = score_tokens(logits, TARGETS[places], shard, rows=ROWS[places], kept=kept.of_targets(places)).log_probs
    torch.testing.assert_close(some, whole[places], atol=1e-6, rtol=0)
    assert [len(part) for part in KeptTokens.of(*sets_of([]), TARGETS[:0].numpy()).split(3)] == [0]


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_memory_is_that_of_a_chunk() -> None:
    rows, vocab, chunk = 64, 512, 4
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(rows)
    # Far more kept entries than fit a chunk: every set is half of the vocabulary.
    kept = KeptTokens.of(*sets_of([tuple(range(vocab // 2))] * rows), targets.numpy())
    leaf = logits.requires_grad_()
    scaled = leaf * 1
    with LargestTensor() as largest:
        scores = score_tokens(
            scaled, targets, VocabShard.of(vocab, vocab), chunk_size=chunk, kept=kept, reuse_logits=True
        )
        forward = largest.elements
        scores.log_probs.sum().backward()
    assert forward <= chunk * vocab
    # ``grad_logits`` is written over the logits, which only appear as the gradient that is handed on.
    assert largest.elements <= rows * vocab
    assert leaf.grad is not None
    assert not leaf.grad[:, vocab // 2 :].any()


def _score_shard(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        logits, weights, entropy_weights = example()
        columns = PADDED // world
        span = slice(rank * columns, (rank + 1) * columns)
        shard = VocabShard.of(VOCAB, columns, rank, dist.group.WORLD)
        for with_entropy in (False, True):
            want = reference(logits, 0.9, weights, entropy_weights * with_entropy)
            mine = logits[:, span].clone().requires_grad_()
            scores = score_tokens(
                mine,
                TARGETS,
                shard,
                rows=ROWS,
                temperature=0.9,
                chunk_size=3,
                with_entropy=with_entropy,
                kept=kept_sets(),
            )
            loss = scores.log_probs @ weights.float()
            if scores.entropy is not None:
                torch.testing.assert_close(scores.entropy.double(), want[1], **TOLERANCE)
                loss = loss + scores.entropy @ entropy_weights.float()
            loss.backward()
            torch.testing.assert_close(scores.log_probs.double(), want[0], **TOLERANCE)
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.double(), want[2][:, span], **TOLERANCE)
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, 4])
def test_shards_equal_the_whole(tmp_path: Path, world: int) -> None:
    mp.spawn(_score_shard, args=(str(tmp_path / "store"), world), nprocs=world, join=True)


BATCH = make_rollout(num_groups=1, group_size=2, fan_out=False)
RESPONSES = [t[-n:] for t, n in zip(BATCH.tokens, BATCH.response_lengths, strict=True)]


def with_sets(*sets: list[tuple[int, ...]]) -> RolloutBatch:
    ids, offsets = zip(*(sets_of(rows) for rows in sets), strict=True)
    return replace(BATCH, rollout_top_p_token_ids=list(ids), rollout_top_p_token_offsets=list(offsets))


def test_sets_of_a_batch() -> None:
    targets = np.concatenate(RESPONSES)
    assert kept_tokens(BATCH, [0, 1], targets) is None
    rows = [(int(t), int(t) + 1) for t in RESPONSES[1]]
    batch = with_sets([()] * len(RESPONSES[0]), rows)
    found = kept_tokens(batch, [0, 1], targets)
    assert found is not None
    assert found.offsets.tolist() == [0] * len(RESPONSES[0]) + [2 * i for i in range(len(rows) + 1)]
    assert found.ids.tolist() == [i for row in rows for i in row]
    assert kept_tokens(batch, [0], RESPONSES[0]) is None


def test_missing_and_unknown_ids_are_refused() -> None:
    plain = [[(int(t),) for t in response] for response in RESPONSES]
    check_kept_tokens(with_sets(*plain), vocab_size=300, truncated_by="--rollout-top-p 0.8")
    unknown = [plain[0], [(*row, 300) for row in plain[1]]]
    with pytest.raises(DataError, match=r"sample 1: .* ids from \d+ to 300; .* 300 tokens"):
        check_kept_tokens(with_sets(*unknown), vocab_size=300, truncated_by=None)
    for batch in (BATCH, with_sets([()] * len(plain[0]), plain[1])):
        check_kept_tokens(batch, vocab_size=300, truncated_by=None)
        with pytest.raises(
            DataError, match=r"sample 0 carries no rollout_top_p_token_ids, but --rollout-top-k 5 trunc"
        ):
            check_kept_tokens(batch, vocab_size=300, truncated_by="--rollout-top-k 5")
    masked = replace(BATCH, loss_masks=[np.zeros_like(mask) for mask in BATCH.loss_masks])
    check_kept_tokens(masked, vocab_size=300, truncated_by="--rollout-top-k 5")
