"""The critic on one CUDA device, against float64 over transformers' hidden states.

Tolerances. In fp32 (TF32 off) only the order of sums differs from the reference. In bf16 hidden states of a
random model carry about 8 bits; values are products with them in fp32, so they are off by about 1 % of their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.megatron.test_critic import (
    BATCH,
    DATA,
    VALUE_CLIP,
    as_rows,
    critic,
    gradients,
    make_value_model,
    reference_values,
    slow_mean,
    slow_value_loss,
    stored_head,
)

from slime.backends.megatron import parallel  # isort: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _exact_fp32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    parallel.destroy()


@pytest.mark.parametrize(("precision", "value", "relative"), [("fp32", 2e-5, 1e-4), ("bf16", 3e-2, 5e-2)])
def test_values_and_a_step_equal_float64(tmp_path: Path, precision: str, value: float, relative: float) -> None:
    model_dir = make_value_model(tmp_path)
    reference = reference_values(model_dir, BATCH, *stored_head(model_dir))
    generator = torch.Generator().manual_seed(5)
    old = [v.detach() + torch.randn(len(v), generator=generator) * 0.5 for v in reference.values]
    returns = [v.detach() + torch.randn(len(v), generator=generator) for v in reference.values]
    loss = slow_mean(BATCH, slow_value_loss(reference.values, old, returns))
    _, norm = gradients(loss, reference.parameters)
    sections = {"cluster": {"device": "cuda"}, "train": {"precision": precision}, "data": DATA}
    with critic(model_dir, algorithm={"value_clip": VALUE_CLIP}, **sections) as worker:
        scores = worker.score(BATCH)
        metrics = worker.train(BATCH, as_rows(old), as_rows(returns))
    errors = torch.cat([torch.from_numpy(scores[i]) - want.detach() for i, want in enumerate(reference.values)]).abs()
    assert errors.max().item() < value
    assert metrics["critic-train/value_loss"] == pytest.approx(loss.item(), rel=relative)
    assert metrics["critic-train/grad_norm"] == pytest.approx(norm, rel=relative)
