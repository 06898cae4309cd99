"""Chosen-token log-probs against a float64 log_softmax: values, gradients, chunks, shards, padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch import multiprocessing as mp

from slime.backends.megatron.logprobs import score_tokens
from slime.backends.megatron.vocab_kernels import VocabKernels
from slime.backends.megatron.vocab_shard import VocabShard

ROWS, VOCAB, PADDED = 11, 37, 48
KERNELS = VocabKernels(compiled=False)
EITHER = pytest.mark.parametrize("kernels", [None, KERNELS], ids=["chunks", "kernels"])


def reference(
    logits: Tensor, targets: Tensor, rows: Tensor, temperature: float, weights: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and gradient of their weighted sum, in float64 and whole."""
    leaf = logits.double().requires_grad_()
    full = torch.log_softmax(leaf[:, :VOCAB] / temperature, dim=-1)
    log_probs = full[rows].gather(1, targets[:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)[rows]
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    assert leaf.grad is not None
    return log_probs.detach(), entropy.detach(), leaf.grad


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(ROWS, PADDED, generator=generator) * 4).to(dtype)
    rows = torch.cat([torch.arange(ROWS), torch.tensor([0, 0, 5])])
    targets = torch.randint(0, VOCAB, (len(rows),), generator=generator)
    targets[-3:] = torch.stack([targets[0], (targets[0] + 1) % VOCAB, targets[5]])
    weights = tuple(torch.randn(len(rows), generator=generator, dtype=torch.float64) for _ in range(2))
    return logits, targets, rows, weights  # type: ignore[return-value]


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 100, "kernels"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reuse_logits", [False, True])
def test_values_and_gradients_equal_float64(chunk_size: int | str, temperature: float, reuse_logits: bool) -> None:
    logits, targets, rows, weights = example()
    want = reference(logits, targets, rows, temperature, weights)
    leaf = logits.clone().requires_grad_()
    scores = score_tokens(
        leaf * 1.0,
        targets,
        VocabShard.of(VOCAB, PADDED),
        rows=rows,
        temperature=temperature,
        with_entropy=True,
        reuse_logits=reuse_logits,
        **({"kernels": KERNELS} if isinstance(chunk_size, str) else {"chunk_size": chunk_size}),
    )
    assert scores.entropy is not None
    (scores.log_probs * weights[0].float() + scores.entropy * weights[1].float()).sum().backward()
    assert scores.log_probs.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs.double(), want[0], atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(scores.entropy.double(), want[1], atol=5e-6, rtol=1e-6)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), want[2], atol=3e-6, rtol=1e-5)
    assert not leaf.grad[:, VOCAB:].any()


@EITHER
def test_no_entropy_gives_the_same_log_probs(kernels: VocabKernels | None) -> None:
    logits, targets, rows, _ = example()
    shard = VocabShard.of(VOCAB, PADDED)
    plain = score_tokens(logits, targets, shard, rows=rows, kernels=kernels)
    assert plain.entropy is None
    both = score_tokens(logits, targets, shard, rows=rows, with_entropy=True, kernels=kernels)
    assert torch.equal(plain.log_probs, both.log_probs)


@EITHER
def test_bf16_logits_are_scored_in_fp32_and_confident_tokens_keep_their_gradient(kernels: VocabKernels | None) -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, 3] = 11.0
    leaf = logits.clone().requires_grad_()
    scores = score_tokens(leaf * 1, torch.tensor([3]), VocabShard.of(VOCAB, VOCAB), kernels=kernels)
    scores.log_probs.sum().backward()
    want = torch.log_softmax(logits.double(), -1)[0, 3]
    torch.testing.assert_close(scores.log_probs[0].double(), want, atol=3e-7, rtol=1e-6)
    assert leaf.grad is not None
    assert leaf.grad[0, 3].item() == pytest.approx(1 - want.exp().item(), rel=1e-2)


@EITHER
def test_minus_infinity_logits_do_not_poison(kernels: VocabKernels | None) -> None:
    logits, targets, _, _ = example()
    targets = targets[:ROWS]
    for row, target in enumerate(targets):
        logits[row, (int(target) + 1) % VOCAB] = float("-inf")
    leaf = logits.requires_grad_()
    scores = score_tokens(leaf, targets, VocabShard.of(VOCAB, PADDED), with_entropy=True, kernels=kernels)
    assert scores.entropy is not None
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    assert leaf.grad is not None
    assert torch.isfinite(scores.log_probs).all()
    assert torch.isfinite(scores.entropy).all()
    assert torch.isfinite(leaf.grad).all()


@EITHER
def test_no_rows(kernels: VocabKernels | None) -> None:
    leaf = torch.zeros(0, PADDED, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    scores = score_tokens(leaf, none, VocabShard.of(VOCAB, PADDED), with_entropy=True, kernels=kernels)
    scores.log_probs.sum().backward()
    assert scores.log_probs.shape == (0,)


def _score_shard(rank: int, store: str, world: int, kernels: VocabKernels | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        logits, targets, rows, weights = example()
        want = reference(logits, targets, rows, 0.9, weights)
        columns = PADDED // world
        mine = logits[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
        shard = VocabShard.of(VOCAB, columns, rank, dist.group.WORLD)
        scores = score_tokens(
            mine, targets, shard, rows=rows, temperature=0.9, chunk_size=3, with_entropy=True, kernels=kernels
        )
        assert scores.entropy is not None
        (scores.log_probs * weights[0].float() + scores.entropy * weights[1].float()).sum().backward()
        torch.testing.assert_close(scores.log_probs.double(), want[0], atol=5e-6, rtol=1e-6)
        torch.testing.assert_close(scores.entropy.double(), want[1], atol=5e-6, rtol=1e-6)
        assert mine.grad is not None
        part = want[2][:, rank * columns : (rank + 1) * columns]
        torch.testing.assert_close(mine.grad.double(), part, atol=3e-6, rtol=1e-5)
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world", "kernels"), [(2, None), (4, None), (4, KERNELS)])
def test_shards_equal_the_whole(tmp_path: Path, world: int, kernels: VocabKernels | None) -> None:
    # With four shards the last holds a single real column, with padding behind it.
    mp.spawn(_score_shard, args=(str(tmp_path / "store"), world, kernels), nprocs=world, join=True)
