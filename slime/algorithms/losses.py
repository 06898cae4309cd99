"""Token losses: clipped policy gradient and its relatives, value loss, supervised loss.

Every function maps ``[R]`` tensors to a ``[R]`` loss, one entry per response token; reduction and
masking happen in ``objective``. Tests hold: values and gradients equal float64 references.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.reduction import segment_means, spread


def clipped_policy_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate with separate bounds and an optional dual clip.

    ``max(-rA, -clip(r, 1 - eps_clip, 1 + eps_clip_high)A)``; with ``eps_clip_c`` the loss of a
    negative advantage is bounded by ``-cA``. Papers: https://arxiv.org/abs/1707.06347,
    https://arxiv.org/abs/2503.14476 (asymmetric), https://arxiv.org/abs/1912.09729 (dual).

    Args:
        ppo_kl: ``[R]`` old minus current log-probs; the ratio is ``exp(-ppo_kl)``.
        advantages: ``[R]``.
        eps_clip: Lower clip distance.
        eps_clip_high: Upper clip distance.
        eps_clip_c: Dual clip factor, greater than 1; None switches it off.

    Returns:
        ``[R]`` loss and ``[R]`` indicator of tokens whose clipped term is the larger.

    Raises:
        ValueError: ``eps_clip_c`` is not greater than 1.
    """
    ratio = torch.exp(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    clip_fraction = (clipped > unclipped).to(loss.dtype)
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c is {eps_clip_c}; the dual clip needs a factor greater than 1")
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, clip_fraction


def cispo_loss(
    ppo_kl: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """CISPO: clip the importance weight, not the update; every token keeps its gradient.

    ``-stopgrad(clip(r)) * A * log_probs``. Paper: https://arxiv.org/abs/2506.13585.

    Args:
        ppo_kl: ``[R]`` old minus current log-probs.
        log_probs: ``[R]`` current log-probs; the only input that gets a gradient.
        advantages: ``[R]``.
        eps_clip: Lower clip distance; 1 or more means no lower bound.
        eps_clip_high: Upper clip distance.

    Returns:
        ``[R]`` loss and ``[R]`` indicator of ratios outside the bounds.
    """
    ratio = torch.exp(-ppo_kl.detach())
    clamped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clamped * advantages * log_probs, (clamped != ratio).to(log_probs.dtype)


def sequence_kl(ppo_kl: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """GSPO: each sequence's masked mean of ``ppo_kl``, on every token of it.

    Its exponential is the sequence ratio of https://arxiv.org/abs/2507.18071; the gradient is
    shared over the tokens of the sequence.

    Args:
        ppo_kl: ``[R]``.
        mask: ``[R]``.
        lengths: N response lengths, summing to R.

    Returns:
        ``[R]``.
    """
    return spread(segment_means(ppo_kl, mask, lengths), lengths)


def off_policy_sequence_mask(
    ppo_kl: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    delta: float,
) -> tuple[Tensor, Tensor]:
    """Find the tokens that off-policy sequence masking (OPSM) removes.

    A token goes when its advantage is negative and its sequence's masked mean of ``ppo_kl``
    exceeds ``delta``.

    Args:
        ppo_kl: ``[R]`` old minus current log-probs, per token.
        advantages: ``[R]``.
        mask: ``[R]``.
        lengths: N response lengths, summing to R.
        delta: Threshold.

    Returns:
        ``[R]`` factor, 0 or 1, and a scalar: the removed share of each sequence, summed over sequences.
    """
    drifted = spread(segment_means(ppo_kl.detach(), mask, lengths) > delta, lengths)
    removed = drifted & (advantages < 0)
    share = segment_means(removed.to(ppo_kl.dtype), mask, lengths)
    return (~removed).to(ppo_kl.dtype), share.sum()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss, without the factor one half.

    Args:
        values: ``[R]`` current values.
        old_values: ``[R]`` values before the update.
        returns: ``[R]`` targets.
        value_clip: Largest useful distance from the old value.

    Returns:
        ``[R]`` loss and ``[R]`` indicator of tokens whose clipped term is the larger.
    """
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    free, clipped = (values - returns).square(), (near - returns).square()
    return torch.maximum(free, clipped), (clipped > free).to(values.dtype)


def sft_loss(log_probs: Tensor) -> Tensor:
    """Negative log-likelihood of the response tokens. ``[R]`` to ``[R]``."""
    return -log_probs
