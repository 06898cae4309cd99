"""Advantages and returns of response tokens, from a rollout's reward and per-token KL.

Works on the samples at hand, one ``[R_i]`` tensor each; needs no other sample (group baselines
are in ``baselines``, whitening over all ranks in ``reduction``). Tests hold: each estimator equals
a token-by-token float64 recursion; the chunked scan equals the plain one for any chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCAN_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator sees.

    Args:
        rewards: N rewards after group shaping.
        kl: N x ``[R_i]`` per-token KL to the reference (zeros where there is none).
        masks: N x ``[R_i]`` loss masks.
        values: N x ``[R_i]`` critic values; None without a critic.
        kl_coef: Factor of the KL penalty.
        gamma: Discount.
        lambd: GAE's lambda.
    """

    rewards: Sequence[float]
    kl: Sequence[Tensor]
    masks: Sequence[Tensor]
    values: Sequence[Tensor] | None = None
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages and returns, N x ``[R_i]`` each."""

    advantages: list[Tensor]
    returns: list[Tensor]


Estimator = Callable[[AdvantageInputs], Advantages]


def discounted_sums(x: Tensor, discount: float, chunk: int = SCAN_CHUNK) -> Tensor:
    """``y_t = x_t + discount * y_{t+1}`` from the right, chunk by chunk.

    A chunk is one product with a triangular matrix of powers, so a sequence of T tokens takes
    T / chunk steps instead of T.

    Args:
        x: ``[T]``.
        discount: Factor per token, 0 to 1.
        chunk: Tokens per product.

    Returns:
        ``[T]`` in the dtype of ``x``.
    """
    length = x.numel()
    if length == 0:
        return x.clone()
    size = min(chunk, length)
    index = torch.arange(size, device=x.device)
    distance = index[None, :] - index[:, None]
    powers = torch.where(distance >= 0, x.new_tensor(discount) ** distance.clamp(min=0), x.new_zeros(()))
    to_end = x.new_tensor(discount) ** (size - index)
    out, carry = torch.empty_like(x), x.new_zeros(())
    for stop in range(length, 0, -size):
        start = max(stop - size, 0)
        n = stop - start
        out[start:stop] = powers[:n, :n] @ x[start:stop] + to_end[size - n :] * carry
        carry = out[start]
    return out


def broadcast_reward(inputs: AdvantageInputs) -> Advantages:
    """GRPO, GSPO, CISPO: every response token gets the shaped reward of its rollout."""
    rows = [torch.full_like(k, r) for r, k in zip(inputs.rewards, inputs.kl, strict=True)]
    return Advantages(advantages=rows, returns=list(rows))


def leave_one_out(inputs: AdvantageInputs) -> Advantages:
    """RLOO: the reward above its leave-one-out baseline, minus the KL penalty from each token to the end.

    Paper: https://arxiv.org/abs/2402.14740. The baseline (``baselines``) is of rewards only; a token's
    penalty counts what follows it, which leaves the gradient of the paper's sequence penalty unchanged
    in expectation.
    """
    rows: list[Tensor] = []
    for reward, kl, mask in zip(inputs.rewards, inputs.kl, inputs.masks, strict=True):
        penalties = torch.where(mask.bool(), -inputs.kl_coef * kl, torch.zeros_like(kl))
        rows.append(reward + discounted_sums(penalties, 1.0))
    return Advantages(advantages=rows, returns=list(rows))


def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE++: discounted sum of the KL penalty and the reward at the last trained token.

    Paper: https://arxiv.org/abs/2501.03262. A sample without a trained token, such as one that failed, gets zeros.
    """
    rows: list[Tensor] = []
    for reward, kl, mask in zip(inputs.rewards, inputs.kl, inputs.masks, strict=True):
        token_rewards = torch.where(mask.bool(), -inputs.kl_coef * kl, torch.zeros_like(kl))
        trained = mask.nonzero()
        if len(trained):
            token_rewards[trained[-1]] += reward
        rows.append(discounted_sums(token_rewards, inputs.gamma))
    return Advantages(advantages=rows, returns=list(rows))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE++ with a group baseline: shaped reward minus the KL penalty, token by token."""
    rows = [r - inputs.kl_coef * k for r, k in zip(inputs.rewards, inputs.kl, strict=True)]
    return Advantages(advantages=rows, returns=list(rows))


def generalized_advantages(inputs: AdvantageInputs) -> Advantages:
    """PPO: generalized advantage estimation over critic values.

    Paper: https://arxiv.org/abs/1506.02438. The reward sits at the final response token.

    Raises:
        ValueError: There are no critic values.
    """
    if inputs.values is None:
        raise ValueError("--advantage-estimator ppo needs critic values, and none were computed")
    advantages: list[Tensor] = []
    returns: list[Tensor] = []
    for reward, kl, values in zip(inputs.rewards, inputs.kl, inputs.values, strict=True):
        deltas = -inputs.kl_coef * kl - values
        if deltas.numel():
            deltas[-1] += reward
            deltas[:-1] += inputs.gamma * values[1:]
        row = discounted_sums(deltas, inputs.gamma * inputs.lambd)
        advantages.append(row)
        returns.append(row + values)
    return Advantages(advantages=advantages, returns=returns)


def reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """On-policy distillation's one-sample estimate of KL(student || teacher) at each token.

    Its negative is added to the advantages: the policy gradient then follows the gradient of the
    divergence on the student's own samples. See https://arxiv.org/abs/2306.08543.

    Args:
        student_log_probs: ``[R]`` of the policy that wrote the response.
        teacher_log_probs: ``[R]``.
        mask: ``[R]``, 1 where a token is trained.

    Returns:
        ``[R]``; 0 at masked tokens, whatever the log-probs there are.
    """
    return torch.where(mask.bool(), student_log_probs - teacher_log_probs, torch.zeros_like(student_log_probs))
