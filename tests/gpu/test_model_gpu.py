"""The training model on a CUDA device: flash attention over packed rows, half precision, one training step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.support.tiny_models import make_tiny_model
from tests.support.training import loaded_model, make_config, start

from slime.backends.megatron import parallel  # isort: skip
from slime.backends.megatron.attention import PackedLayout, pack_row  # isort: skip
from slime.backends.megatron.export import iter_hf_buckets  # isort: skip
from slime.backends.megatron.layout import context_parallel_index  # isort: skip
from slime.backends.megatron.model import build_optimizer  # isort: skip
from slime.backends.megatron.varlen import VarlenPlan  # isort: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
logger = logging.getLogger(__name__)
CUDA = {"device": "cuda"}
GROUPS = [(300, [500, 90, 333]), (11, [200, 1, 60, 64]), (400, [4])]


@pytest.fixture(autouse=True)
def _leave_groups() -> Iterator[None]:
    yield
    parallel.destroy()


def reference_attention(
    layout: PackedLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    mask = layout.visible().cuda()
    repeats = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(
    "layout",
    [PackedLayout.of_groups(GROUPS, multiple=128), PackedLayout.of_sequences([77, 1, 400, 34], multiple=128)],
    ids=["shared", "sequences"],
)
def test_flash_attention_equals_the_full_mask(layout: PackedLayout, cp_size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, upstream = (
        torch.randn(layout.num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (8, 2, 2, 8)
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    real = (layout.segment_ids() >= 0).cuda()[:, None, None]
    expected = reference_attention(layout, *exact, 0.125)
    expected_grads = torch.autograd.grad(expected, exact, upstream.double() * real)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = torch.zeros_like(q)
    parts = [context_parallel_index(layout.num_tokens, rank, cp_size) for rank in range(cp_size)]
    gathered = torch.cat(parts)
    for index in parts:
        plan = VarlenPlan(layout, index, gathered, device=torch.device("cuda"))
        on_device = index.cuda()
        keys, values = (x.index_select(0, gathered.cuda()) for x in leaves[1:])
        part = plan.attend(leaves[0].index_select(0, on_device), keys, values, scale=0.125)
        output = output.index_copy(0, on_device, part)
    grads = torch.autograd.grad(output, leaves, upstream)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=0.02)
    for found, wanted in zip(grads, expected_grads, strict=True):
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < 0.01


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_log_probs_equal_transformers(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(tmp_path, family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    layout = PackedLayout.of_groups([(30, [50, 9]), (110, [20])], multiple=8)
    tokens = torch.randint(0, 250, (layout.num_tokens,))
    for precision, bound in (("fp32", 1e-3), ("bf16", 0.1)):
        config = make_config(folder, cluster=CUDA, train={"precision": precision})
        state = start(config)
        (model,) = loaded_model(config, state)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        row = pack_row(layout, dtype=dtype, device=state.device)
        with torch.no_grad():
            logits = model(tokens[None].cuda(), row).float().log_softmax(-1)
            for i, segment in enumerate(layout.segments):
                if segment.prefix is None:
                    continue
                prompt = layout.segments[segment.prefix]
                sequence = torch.cat([tokens[prompt.start : prompt.end], tokens[segment.start : segment.end]])
                expected = reference(sequence[None].cuda()).logits[0, prompt.length - 1 : -1].log_softmax(-1)
                found = logits[layout.predictors(i).cuda(), : expected.size(1)]
                targets = sequence[prompt.length :, None].cuda()
                difference = found.gather(1, targets) - expected.gather(1, targets)
                assert difference.abs().mean() < bound
        parallel.destroy()


def test_training_lowers_the_loss_and_exports_what_it_trained(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3")
    argv = ["--lr", "0.01", "--lr-decay-style", "constant"]
    config = make_config(folder, argv, cluster=CUDA, train={"precision": "bf16"})
    state = start(config)
    chunks = loaded_model(config, state, wrap_with_ddp=True)
    optimizer, _ = build_optimizer(config, chunks)
    layout = PackedLayout.of_groups(GROUPS, multiple=128)
    tokens = torch.randint(0, 250, (layout.num_tokens,)).cuda()
    row = pack_row(layout, dtype=torch.bfloat16, device=state.device)
    index = torch.cat([layout.predictors(i) for i, s in enumerate(layout.segments) if s.prefix is not None]).cuda()
    targets = torch.cat([tokens[s.start : s.end] for s in layout.segments if s.prefix is not None])
    losses = []
    for _ in range(10):
        chunks[0].zero_grad_buffer()
        loss = F.cross_entropy(chunks[0](tokens[None], row, index).float(), targets)
        loss.backward()
        chunks[0].finish_grad_sync()
        ok, _, _ = optimizer.step()
        assert ok
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    exported = {name: t for bucket in iter_hf_buckets(chunks, config, 2**20) for name, t in bucket}
    assert all(t.is_cuda and t.dtype == torch.bfloat16 for t in exported.values())


def test_speed_of_a_small_model(tmp_path: Path) -> None:
    """Logs tokens per second of forward and backward at the shape of a 0.6B model."""
    folder = make_tiny_model(
        tmp_path,
        "qwen3",
        torch_dtype="bfloat16",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    config = make_config(folder, cluster=CUDA, train={"precision": "bf16"})
    state = start(config)
    (model,) = loaded_model(config, state, wrap_with_ddp=True)
    for name, layout in (
        ("shared", PackedLayout.of_groups([(512, [1024] * 8)] * 2, multiple=128)),
        ("copies", PackedLayout.of_sequences([1536] * 16, multiple=128)),
    ):
        tokens = torch.randint(0, 250, (1, layout.num_tokens)).cuda()
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            row = pack_row(layout, dtype=torch.bfloat16, device=state.device)
            model(tokens, row).float().logsumexp(-1).sum().backward()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        rate = layout.num_tokens / min(seconds)
        logger.info("%s: %d tokens, %.3f s, %.0f tokens/s", name, layout.num_tokens, min(seconds), rate)
        assert rate > 10_000
