"""The optimizer's kernels, on a CPU: the default's results but for rounding, and the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker, weights_of

from megatron.core.optimizer import clip_grads  # isort: skip  (after the CPU substitutions)
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale  # isort: skip
from slime.backends.megatron.update_kernels import fuse_clipping, fuse_updates, norm_of_all, scale_all  # isort: skip

pytestmark = pytest.mark.timeout(120)

BATCHES = [make_rollout(seed=i, rollout_id=i) for i in range(3)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def train(
    model_dir: Path, save: Path, *, fused: bool, load: Path | None = None, first: int = 0
) -> dict[str, torch.Tensor]:
    config = make_config(
        model_dir,
        ("--lr", "1e-3", "--lr-decay-style", "constant", "--weight-decay", "0.1"),
        data={"global_batch_size": 6, "micro_batch_size": 5},
        checkpoint={"save": str(save), "load": None if load is None else str(load)},
    )
    with running_worker(config) as worker:
        if fused:
            fuse_updates(worker._trainable.optimizer)
        for batch in BATCHES[first:]:
            worker.train(batch)
            if fused:
                assert updates_are_fused(worker)
            worker.save(batch.rollout_id)
        return weights_of(worker)


def updates_are_fused(worker: Any) -> bool:
    (part,) = worker._trainable.optimizer_parts
    return all(group["fused"] and not group["foreach"] for group in part.optimizer.param_groups)


def test_the_default_update_but_for_rounding(model_dir: Path, tmp_path: Path) -> None:
    fused = train(model_dir, tmp_path / "fused", fused=True)
    default = train(model_dir, tmp_path / "default", fused=False)
    before = start(model_dir)
    moved = sum((tensor - before[name]).abs().sum() for name, tensor in default.items())
    apart = sum((tensor - fused[name]).abs().sum() for name, tensor in default.items())
    assert moved > 0
    assert apart < 1e-3 * moved


def start(model_dir: Path) -> dict[str, torch.Tensor]:
    with running_worker(make_config(model_dir)) as worker:
        return weights_of(worker)


@pytest.mark.parametrize("written_fused", [True, False])
def test_a_resume_is_fused_whatever_wrote_the_checkpoint(model_dir: Path, tmp_path: Path, written_fused: bool) -> None:
    whole = train(model_dir, tmp_path / "whole", fused=written_fused)
    (tmp_path / "whole" / "latest_checkpointed_iteration.txt").write_text("1")
    rest = train(model_dir, tmp_path / "rest", fused=True, load=tmp_path / "whole", first=2)
    for name, tensor in whole.items():
        if written_fused:
            assert torch.equal(rest[name], tensor)
        else:
            torch.testing.assert_close(rest[name], tensor, rtol=0, atol=2e-5)


def test_norm_and_scale_are_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((3, 4), (7,), (1, 1, 5))]
    nothing = torch.zeros(1)
    (want, _), (found, _) = (f(1, nothing, [tensors], False) for f in (local_multi_tensor_l2_norm, norm_of_all))
    assert found.shape == (1,)
    torch.testing.assert_close(found, want)
    assert found.item() == pytest.approx(torch.cat([t.flatten() for t in tensors]).norm().item())
    for same in (True, False):
        mine, theirs = ([t.clone() for t in tensors] for _ in range(2))
        for function, values in ((local_multi_tensor_scale, theirs), (scale_all, mine)):
            function(1, nothing, [values if same else tensors, values], 0.3)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    fuse_clipping()
    assert (clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl) == (norm_of_all, scale_all)
