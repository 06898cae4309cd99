"""Token losses: values and gradients against float64 formulas written out per token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime.algorithms.losses import (
    cispo_loss,
    clipped_policy_loss,
    off_policy_sequence_mask,
    sequence_kl,
    sft_loss,
    value_loss,
)

LOW, HIGH = 0.2, 0.28


def example() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    log_probs = (-torch.rand(60, generator=generator) * 3).requires_grad_()
    old = log_probs.detach() + torch.randn(60, generator=generator) * 0.4
    return log_probs, old, torch.randn(60, generator=generator)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return grad


@pytest.mark.parametrize("dual", [None, 1.5])
def test_clipped_policy_loss(dual: float | None) -> None:
    log_probs, old, advantages = example()
    loss, fraction = clipped_policy_loss(old - log_probs, advantages, LOW, HIGH, dual)
    got = gradient(loss, log_probs)
    log_probs = log_probs.detach()
    for i in range(len(old)):
        a, r = float(advantages[i]), float((log_probs[i].double() - old[i].double()).exp())
        free, clipped = -r * a, -min(max(r, 1 - LOW), 1 + HIGH) * a
        value = max(free, clipped)
        slope = free if free >= clipped else 0.0  # d(-rA)/dlogp = -rA
        if dual is not None and a < 0 and -dual * a < value:
            value, slope = -dual * a, 0.0
        assert loss[i].item() == pytest.approx(value, abs=1e-5)
        assert got[i].item() == pytest.approx(slope, abs=1e-5)
        assert fraction[i].item() == float(clipped > free)


def test_dual_clip_needs_a_factor_above_one() -> None:
    with pytest.raises(ValueError, match=r"--eps-clip-c is 0\.9"):
        clipped_policy_loss(torch.zeros(1), torch.zeros(1), LOW, HIGH, 0.9)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    log_probs, old, advantages = example()
    loss, fraction = cispo_loss(old - log_probs, log_probs, advantages, LOW, HIGH)
    ratio = (log_probs.double() - old.double()).exp()
    weight = ratio.clamp(1 - LOW, 1 + HIGH)
    torch.testing.assert_close(loss.double(), -weight * advantages * log_probs.double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        gradient(loss, log_probs).double(), (-weight * advantages).detach(), atol=1e-5, rtol=1e-5
    )
    assert fraction.tolist() == (weight != ratio).float().tolist()


def test_sequence_kl_is_the_masked_mean_and_shares_the_gradient() -> None:
    kl = torch.tensor([1.0, 3.0, 100.0, 5.0], requires_grad=True)
    mask = torch.tensor([1.0, 1, 0, 1])
    got = sequence_kl(kl, mask, [3, 1])
    assert got.tolist() == [2, 2, 2, 5]
    assert gradient(got[0], kl).tolist() == [0.5, 0.5, 0, 0]


def test_opsm_removes_negative_tokens_of_drifted_sequences() -> None:
    kl = torch.tensor([1.0, 1.0, 0.0, 0.0])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    kept, removed = off_policy_sequence_mask(kl, advantages, torch.ones(4), [2, 2], 0.5)
    assert kept.tolist() == [0, 1, 1, 1]
    assert removed.item() == 0.5


def test_value_loss() -> None:
    values, old, returns = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]), torch.tensor([3.0, 2.5])
    loss, fraction = value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([2.8**2, 0.25])
    assert fraction.tolist() == [1, 0]


def test_sft_loss() -> None:
    assert sft_loss(torch.tensor([-2.0])).item() == 2
