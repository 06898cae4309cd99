"""Bytes that scoring takes on a CUDA device besides the logits, forward and backward."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron.logprobs import score_tokens
from slime.backends.megatron.vocab_kernels import VocabKernels
from slime.backends.megatron.vocab_shard import VocabShard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS, VOCAB, CHUNK = 4096, 151_936, 256
PER_ROW = 60 * 8
"""Numbers per token that may exist besides: log-probs, normalisers, positions, sorting, their gradients."""
SLACK = 4 << 20
"""Rounding of the allocator and workspaces of reductions."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_loss", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["chunks", "kernels"])
def test_forward_and_backward_take_one_chunk(dtype: torch.dtype, entropy_loss: bool, compiled: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator, device="cuda", dtype=dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator, device="cuda")
    rows = torch.arange(ROWS, device="cuda")
    sample = slice(0, 8)
    leaf = logits.detach()[sample].double().requires_grad_()
    full = torch.log_softmax(leaf / 0.9, -1)
    want = full.gather(1, targets[sample, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    (want.sum() + (entropy.sum() if entropy_loss else 0)).backward()
    assert leaf.grad is not None

    kernels = VocabKernels(compiled=True) if compiled else None
    if kernels is not None:  # compile, which takes memory of its own
        warm = logits.detach().clone().requires_grad_()
        found = score_tokens(warm, targets, VocabShard.of(VOCAB, VOCAB), with_entropy=True, kernels=kernels)
        assert found.entropy is not None
        (found.log_probs.sum() + (found.entropy.sum() if entropy_loss else 0)).backward()
        del warm, found
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = score_tokens(
        logits,
        targets,
        VocabShard.of(VOCAB, VOCAB),
        rows=rows,
        temperature=0.9,
        chunk_size=CHUNK,
        with_entropy=True,
        reuse_logits=True,
        kernels=kernels,
    )
    assert scores.entropy is not None
    loss = scores.log_probs.sum() + (scores.entropy.sum() if entropy_loss else 0)
    (gradient,) = torch.autograd.grad(loss, logits)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= (0 if compiled else CHUNK * VOCAB * 4) + ROWS * PER_ROW + SLACK
    assert gradient.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(scores.log_probs[sample].double(), want.detach(), atol=2e-5, rtol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(gradient[sample].double(), leaf.grad, atol=tolerance * 1e-1, rtol=tolerance)
