"""Per-token estimators of the KL divergence between two policies.

Owns the estimators and nothing about where the log-probs come from or how values are reduced.
Tests hold: each estimator equals its float64 formula; k3 and low_var_kl are never negative.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]
KL_KINDS: tuple[str, ...] = get_args(KLKind)

LOW_VAR_BOUND = 10.0


def approx_kl(
    log_probs: Tensor,
    base_log_probs: Tensor,
    kind: str,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || base) token by token from samples of the policy.

    With ``d = log_probs - base_log_probs``: k1 is ``d``; k2 is ``d**2 / 2``; k3 and low_var_kl are
    ``exp(-d) - 1 + d`` (http://joschu.net/blog/kl-approx.html). low_var_kl is clamped to
    [-10, 10] after the multiplication by ``importance_ratio``.

    Args:
        log_probs: ``[R]`` log-probs under the policy.
        base_log_probs: ``[R]`` log-probs under the base policy.
        kind: One of ``KL_KINDS``.
        importance_ratio: ``[R]`` ratio policy / behaviour policy; makes the estimate unbiased when
            the tokens were sampled from the behaviour policy. Only for use inside a loss.

    Returns:
        ``[R]`` float32 (float64 for float64 input), with gradients to whatever input has them.

    Raises:
        ValueError: ``kind`` is not known.
    """
    if log_probs.dtype != torch.float64:
        log_probs, base_log_probs = log_probs.float(), base_log_probs.float()
    difference = log_probs - base_log_probs
    match kind:
        case "k1":
            kl = difference
        case "k2":
            kl = difference.square() / 2
        case "k3" | "low_var_kl":
            # expm1 keeps the digits that exp(x) - 1 loses when the two policies nearly agree.
            kl = torch.expm1(-difference) + difference
        case _:
            raise ValueError(f"KL estimator {kind!r} is not known; accepted: {', '.join(KL_KINDS)}")
    if importance_ratio is not None:
        kl = importance_ratio * kl
    if kind == "low_var_kl":
        kl = kl.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return kl
