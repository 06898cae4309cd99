"""Mixtures of experts and multi-latent attention on a CUDA device: grouped products, narrow values, log-probs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.support.tiny_models import Family, make_tiny_model
from tests.support.training import loaded_model, make_config, start

from slime.backends.megatron import parallel  # isort: skip
from slime.backends.megatron.attention import PackedLayout, pack_row  # isort: skip
from slime.backends.megatron.experts import grouped_swiglu  # isort: skip
from slime.backends.megatron.varlen import VarlenPlan  # isort: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
logger = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _leave_groups() -> Iterator[None]:
    yield
    parallel.destroy()


def one_by_one(
    hidden: torch.Tensor, first: torch.Tensor, second: torch.Tensor, probs: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    outputs = []
    pieces = zip(hidden.split(counts), probs.split(counts), first, second, strict=True)
    for tokens, weights, gate_up, down in pieces:
        gate, up = (tokens @ gate_up.T).chunk(2, -1)
        outputs.append((F.silu(gate) * up * weights[:, None]).to(tokens.dtype) @ down.T)
    return torch.cat(outputs)


def tensors(counts: list[int], hidden: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(counts), hidden), (len(counts), 2 * width, hidden), (len(counts), hidden, width)]
    scales = [1.0, hidden**-0.5, width**-0.5]
    made = [
        (torch.randn(*shape, device="cuda", generator=generator) * scale).bfloat16()
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    return [*made, torch.rand(sum(counts), device="cuda", generator=generator)]


def test_grouped_experts_equal_the_experts_one_by_one() -> None:
    counts = [37, 0, 300, 1, 64, 0, 5, 128]
    leaves = [x.requires_grad_() for x in tensors(counts, 256, 96)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    output, expected = grouped_swiglu(*leaves, ends), one_by_one(*exact, counts)
    upstream = torch.randn_like(output)
    found = torch.autograd.grad(output, leaves, upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for mine, theirs in zip((output, *found), (expected, *wanted), strict=True):
        assert torch.isfinite(mine).all()
        assert (mine.double() - theirs).norm() / theirs.norm() < 0.01


def test_grouped_experts_are_faster() -> None:
    """One layer of Qwen3-30B-A3B under expert parallelism of 8: 16 experts, 16,384 tokens with 8 choices each."""
    counts = [1024] * 16
    leaves = [x.requires_grad_() for x in tensors(counts, 2048, 768)]
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()

    def milliseconds(forward: Callable[[], torch.Tensor]) -> float:
        upstream = torch.ones_like(forward())
        for step in range(23):
            if step == 3:
                torch.cuda.synchronize()
                started = torch.cuda.Event(enable_timing=True)
                started.record()
            torch.autograd.grad(forward(), leaves, upstream)
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        torch.cuda.synchronize()
        return started.elapsed_time(ended) / 20

    grouped = milliseconds(lambda: grouped_swiglu(*leaves, ends))
    sequential = milliseconds(lambda: one_by_one(*leaves, counts))
    logger.warning("16 experts, forward and backward: grouped %.2f ms, one by one %.2f ms", grouped, sequential)
    assert grouped < sequential


def test_flash_attention_with_values_narrower_than_keys() -> None:
    layout = PackedLayout.of_groups([(30, [50, 9]), (110, [20])], multiple=8)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(layout.num_tokens, 4, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        for width in (192, 192, 128)
    )
    index = torch.arange(layout.num_tokens)
    leaves, exact = ([x.to(dtype).requires_grad_() for x in (q, k, v)] for dtype in (torch.bfloat16, torch.float64))
    output = VarlenPlan(layout, index, index, device=torch.device("cuda")).attend(*leaves, scale=0.1)
    mask = layout.visible().cuda()
    scores = torch.einsum("qhd,khd->hqk", exact[0], exact[1]) * 0.1
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0), exact[2])
    upstream = torch.randn_like(output) * (layout.segment_ids() >= 0).cuda()[:, None, None]
    found, wanted = (
        torch.autograd.grad(output, leaves, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
    )
    for mine, theirs in zip((output, *found), (expected, *wanted), strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < 0.01


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_log_probs_equal_transformers(tmp_path: Path, family: Family) -> None:
    folder = make_tiny_model(tmp_path, family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    layout = PackedLayout.of_sequences([50, 90, 33], multiple=8)
    tokens = torch.randint(0, 250, (layout.num_tokens,))
    with torch.no_grad():
        parts = tokens[:173].split([50, 90, 33])
        expected = torch.cat([reference(part[None].cuda()).logits[0].log_softmax(-1) for part in parts])
    # In bf16 some token's choice of experts falls otherwise, which moves its log-probs by more than rounding.
    for precision, bound in (("fp32", 1e-4), ("bf16", 0.1)):
        config = make_config(folder, ["--moe-grouped-gemm"], cluster={"device": "cuda"}, train={"precision": precision})
        state = start(config)
        (model,) = loaded_model(config, state)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        row = pack_row(layout, dtype=dtype, device=state.device)
        with torch.no_grad():
            found = model(tokens[None].cuda(), row)[:173, : expected.size(1)].float().log_softmax(-1)
        difference = (found - expected).abs()
        logger.warning("%s %s: mean %.2g, max %.2g", family, precision, difference.mean(), difference.max())
        assert (difference.max() if precision == "fp32" else difference.mean()) < bound
        parallel.destroy()
