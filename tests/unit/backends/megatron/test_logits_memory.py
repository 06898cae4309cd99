"""Bytes that scoring takes besides the logits: a chunk of rows in fp32, and a few numbers per row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slime.backends.megatron.logprobs import score_tokens
from slime.backends.megatron.vocab_shard import VocabShard
from tests.support import memory

ROWS, VOCAB, CHUNK = 64, 20_000, 8
PER_ROW = 40 * 8
"""Numbers per token that may exist besides: log-probs, normalisers, positions, their gradients."""


def peak_bytes(work: Callable[[], object]) -> int:
    return memory.in_child(lambda: memory.peak_bytes(work))


def test_the_counter_sees_temporaries() -> None:
    x, one = torch.zeros(1000), torch.ones(1000)
    assert peak_bytes(lambda: (x + one).exp()) == 8000
    assert peak_bytes(lambda: (x + one).exp_()) == 4000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_loss", [False, True])
def test_forward_and_backward_take_one_chunk(dtype: torch.dtype, entropy_loss: bool) -> None:
    logits = torch.randn(ROWS, VOCAB).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS,))

    def work() -> None:
        scores = score_tokens(
            logits,
            targets,
            VocabShard.of(VOCAB, VOCAB),
            temperature=0.9,
            chunk_size=CHUNK,
            with_entropy=True,
            reuse_logits=True,
        )
        assert scores.entropy is not None
        loss = scores.log_probs.sum() + (scores.entropy.sum() if entropy_loss else 0)
        # The gradient is written over the logits; handing it to a leaf would copy it once more.
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.data_ptr() == logits.data_ptr()

    peak = peak_bytes(work)
    assert CHUNK * VOCAB * 2 <= peak <= CHUNK * VOCAB * 4 + ROWS * PER_ROW


def test_without_reuse_the_gradient_is_the_only_copy() -> None:
    logits = torch.randn(ROWS, VOCAB, requires_grad=True)
    targets = torch.randint(0, VOCAB, (ROWS,))

    def work() -> None:
        scores = score_tokens(logits, targets, VocabShard.of(VOCAB, VOCAB), chunk_size=CHUNK)
        torch.autograd.grad(scores.log_probs.sum(), logits)

    assert peak_bytes(work) <= (ROWS + CHUNK) * VOCAB * 4 + ROWS * PER_ROW


def test_a_larger_chunk_takes_more() -> None:
    logits, targets = torch.randn(ROWS, VOCAB), torch.randint(0, VOCAB, (ROWS,))

    def peak(chunk_size: int) -> int:
        shard = VocabShard.of(VOCAB, VOCAB)
        return peak_bytes(lambda: score_tokens(logits, targets, shard, chunk_size=chunk_size, with_entropy=True))

    assert 3.5 < peak(32) / peak(8) < 4.5
