"""Rotary embedding against Megatron's own function."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron import cpu

cpu.install()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

from slime.backends.megatron.rotary import Rotary, install  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 6])
def test_same_values_and_gradients(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 1, 4, 24, generator=generator).to(dtype)
    angles = torch.randn(5, 1, 1, width, generator=generator) * 100
    upstream = torch.randn(5, 1, 4, 8, generator=generator).to(dtype)
    megatrons = rope_utils._apply_rotary_pos_emb_bshd
    found = []
    for function in (megatrons, Rotary(megatrons, compiled=False)):
        leaf = qkv.clone().requires_grad_()
        rotated = function(leaf[..., 8:16], angles, mscale=1.25)  # heads are a view of a wider projection
        found.append((rotated, *torch.autograd.grad(rotated, leaf, upstream)))
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(mine, theirs)


def test_megatrons_attention_calls_what_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", rope_utils._apply_rotary_pos_emb_bshd)
    install()
    installed = rope_utils._apply_rotary_pos_emb_bshd
    assert isinstance(installed, Rotary)
    install()
    assert rope_utils._apply_rotary_pos_emb_bshd is installed
