"""The policy objective of one micro-batch: token losses put together and summed.

Takes flat response-token tensors and plain numbers; returns sums and per-metric sums in the same
reduction. Leaves out the global denominator, loss scaling and every process group. Tests hold: any
split of a batch gives the same sums; values at masked tokens never matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slime.algorithms.corrections import Correction
from slime.algorithms.kl import approx_kl
from slime.algorithms.losses import off_policy_sequence_mask, sequence_kl
from slime.algorithms.reduction import TokenReducer, blank_masked


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """Bounds of the importance ratio: ``1 - low``, ``1 + high``, dual clip factor or None."""

    low: float
    high: float
    dual: float | None = None


PolicyLoss = Callable[[Tensor, Tensor, Tensor, ClipRange], tuple[Tensor, Tensor]]
"""``(ppo_kl, log_probs, advantages, clip) -> (loss, clip indicator)``, all ``[R]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyForm:
    """What distinguishes one estimator's policy loss: the token loss, and what its ratio ranges over."""

    loss: PolicyLoss
    sequence_ratio: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Coefficients and switches of the objective.

    Args:
        clip: Bounds of the ratio.
        entropy_coef: Factor of the entropy bonus.
        kl_loss_coef: Factor of the KL term; None leaves the term out, 0 only measures it.
        kl_kind: Estimator of the KL term.
        unbiased_kl: Multiply the KL term by the importance ratio.
        opsm_delta: Threshold of off-policy sequence masking; None switches it off.
        correction: Engine / trainer correction; None switches it off.
    """

    clip: ClipRange
    entropy_coef: float = 0.0
    kl_loss_coef: float | None = None
    kl_kind: str = "k1"
    unbiased_kl: bool = False
    opsm_delta: float | None = None
    correction: Correction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Response tokens of one micro-batch, sample after sample; R tokens in N samples.

    Args:
        log_probs: ``[R]`` current log-probs, with gradient.
        entropy: ``[R]`` entropy of the current policy; None is neither used nor measured.
        old_log_probs: ``[R]`` before the update; None means this is the first update, so they are
            the current ones.
        rollout_log_probs: ``[R]`` as the engine saw them; None when not recorded.
        ref_log_probs: ``[R]`` of the reference policy; None when there is none.
        advantages: ``[R]``.
        mask: ``[R]`` float, 1 where a token is trained.
        lengths: N response lengths.
        old_from_engine: Whether ``old_log_probs`` are the engine's; the engine is then compared
            with the current log-probs instead.
    """

    log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Sequence[int]
    entropy: Tensor | None = None
    old_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    old_from_engine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Sums of one micro-batch.

    Args:
        loss: Scalar with gradient.
        sums: Metric -> detached scalar in the same reduction as the loss.
        maxima: Metric -> detached scalar that is combined by maximum.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def policy_objective(
    inputs: PolicyInputs,
    form: PolicyForm,
    settings: ObjectiveSettings,
    reducer: TokenReducer,
    pg_reducer: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Objective:
    """Assemble policy loss, correction, entropy bonus and KL term.

    Args:
        inputs: The micro-batch.
        form: The estimator's policy loss.
        settings: Coefficients.
        reducer: Sums tokens with the weights that the loss gives them.
        pg_reducer: ``(values [R], mask [R]) -> scalar`` that replaces the reducer for the policy term.
    """
    x = _blank(inputs)
    old = x.log_probs.detach() if x.old_log_probs is None else x.old_log_probs
    token_kl = old - x.log_probs
    ppo_kl = sequence_kl(token_kl, x.mask, x.lengths) if form.sequence_ratio else token_kl
    pg, clip_fraction = form.loss(ppo_kl, x.log_probs, x.advantages, settings.clip)
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    if settings.opsm_delta is not None:
        kept, removed = off_policy_sequence_mask(token_kl, x.advantages, x.mask, x.lengths, settings.opsm_delta)
        pg = pg * kept
        sums["opsm_clipfrac"] = removed
    mask = x.mask
    if settings.correction is not None and x.rollout_log_probs is not None:
        corrected = settings.correction(pg, old, x.rollout_log_probs)
        pg = corrected.loss
        mask = x.mask if corrected.mask is None else corrected.mask
        sums |= {name: reducer(value) for name, value in corrected.metrics.items()}
        sums["ois"] = reducer(torch.exp(-ppo_kl))
    # Denominators stay those of the loss mask: a rejected token must not give its weight to the others.
    masked_reducer = reducer.with_mask(mask)
    pg_loss = masked_reducer(pg) if pg_reducer is None else pg_reducer(pg, mask)
    sums |= {"pg_loss": pg_loss, "pg_clipfrac": reducer(clip_fraction), "ppo_kl": reducer(ppo_kl)}
    loss = pg_loss
    if x.entropy is not None:
        sums["entropy_loss"] = masked_reducer(x.entropy)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * sums["entropy_loss"]
    if settings.kl_loss_coef is not None and x.ref_log_probs is not None:
        ratio = torch.exp(-token_kl) if settings.unbiased_kl else None
        sums["kl_loss"] = masked_reducer(approx_kl(x.log_probs, x.ref_log_probs, settings.kl_kind, ratio))
        if settings.kl_loss_coef:
            loss = loss + settings.kl_loss_coef * sums["kl_loss"]
    if x.rollout_log_probs is not None:
        scored = x.log_probs.detach() if x.old_from_engine else old
        difference = (scored - x.rollout_log_probs).abs()
        sums["train_rollout_logprob_abs_diff"] = reducer(difference)
        maxima["train_rollout_logprob_abs_diff_max"] = difference.amax() if len(difference) else loss.detach() * 0
    return _finish(loss, sums, maxima)


def _finish(loss: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> Objective:
    detached = {"loss": loss.detach()} | {name: value.detach() for name, value in sums.items()}
    return Objective(loss=loss, sums=detached, maxima={name: value.detach() for name, value in maxima.items()})


def _blank(inputs: PolicyInputs) -> PolicyInputs:
    """Zero every masked entry before any arithmetic: ``0 * inf`` afterwards would be NaN, also in the gradient."""

    def blank(x: Tensor | None) -> Tensor | None:
        return None if x is None else blank_masked(x, inputs.mask)

    return replace(
        inputs,
        log_probs=blank_masked(inputs.log_probs, inputs.mask),
        advantages=blank_masked(inputs.advantages, inputs.mask),
        entropy=blank(inputs.entropy),
        old_log_probs=blank(inputs.old_log_probs),
        rollout_log_probs=blank(inputs.rollout_log_probs),
        ref_log_probs=blank(inputs.ref_log_probs),
    )
