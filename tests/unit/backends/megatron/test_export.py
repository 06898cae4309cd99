"""Tensors of a checkpoint's files: those stored in 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.errors import CheckpointError
from tests.support.training import cpu  # noqa: F401  (installs the CPU substitutions before Megatron)

from slime.backends.megatron.export import Checkpoint  # isort: skip


def test_scaled_8_bit_weights_are_read_in_fp32(tmp_path: Path) -> None:
    weight = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.tensor([[2.0, 0.5]]), "b.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        expected = torch.cat([weight[:, :128].float() * 2, weight[:, 128:].float() * 0.5], 1)
        assert torch.equal(checkpoint["a.weight"], expected)
        assert torch.equal(checkpoint["b.weight"], torch.ones(2))


def test_8_bit_weights_without_scales_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="float8_e4m3fn without"):
        checkpoint["a.weight"]
