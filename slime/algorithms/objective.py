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

from slime.algorithms.corrections import Correction, EngineGap
from slime.algorithms.kl import approx_kl
from slime.algorithms.losses import off_policy_sequence_mask, sequence_kl
from slime.algorithms.monitors import ABS_DIFF, engine_sums, extremes, log_histogram
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
    """What distinguishes one estimator's policy loss.

    Args:
        loss: The token loss.
        sequence_ratio: Its ratio is the sequence's, not the token's.
        dual_clip: It knows the dual clip.
    """

    loss: PolicyLoss
    sequence_ratio: bool = False
    dual_clip: bool = True


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
        old_log_probs: ``[R]`` the trainer's before the update; None takes the current ones, which are
            the same in the first update after a rollout.
        rollout_log_probs: ``[R]`` as the engine saw them; None when not recorded.
        ref_log_probs: ``[R]`` of the reference policy; None when there is none.
        advantages: ``[R]``.
        mask: ``[R]`` float, 1 where a token is trained.
        lengths: N response lengths.
        old_from_engine: The policy ratio is taken to the engine's log-probs; the trainer's old ones
            then only serve the comparison with the engine.
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
        maxima: Metric -> detached scalar that is combined by maximum; -infinity when no token counts.
        minima: Metric -> detached scalar that is combined by minimum; infinity when no token counts.
        histograms: Metric -> ``[NUM_BINS]`` counts (``monitors``) that are added up; quantiles are
            taken of the sum.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    minima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    histograms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(slots=True)
class _Measured:
    """Metrics of a micro-batch as they are found; ``mean`` weighs tokens for them."""

    mean: TokenReducer
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    minima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    histograms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add_range(self, name: str, values: Tensor) -> None:
        """Record the smallest and largest of ``values`` ``[R]``."""
        self.minima[f"{name}_min"], self.maxima[f"{name}_max"] = extremes(values.detach(), self.mean.mask)

    def objective(self, loss: Tensor) -> Objective:
        sums = {"loss": loss.detach()} | {name: value.detach() for name, value in self.sums.items()}
        return Objective(loss=loss, sums=sums, maxima=self.maxima, minima=self.minima, histograms=self.histograms)


def policy_objective(
    inputs: PolicyInputs,
    form: PolicyForm,
    settings: ObjectiveSettings,
    reducer: TokenReducer,
    pg_reducer: Callable[[Tensor, Tensor], Tensor] | None = None,
    metric_reducer: TokenReducer | None = None,
) -> Objective:
    """Assemble policy loss, correction, entropy bonus and KL term.

    ``loss``, ``pg_loss``, ``kl_loss`` and ``entropy_loss`` are in the weights of the loss, everything
    else is a mean.

    Args:
        inputs: The micro-batch.
        form: The estimator's policy loss.
        settings: Coefficients.
        reducer: Sums tokens with the weights that the loss gives them.
        pg_reducer: ``(values [R], mask [R]) -> scalar`` that replaces the reducer for the policy term.
        metric_reducer: Weights of the means; those of the loss when None.
    """
    x = _blank(inputs)
    measured = _Measured(reducer if metric_reducer is None else metric_reducer)
    trainer = x.log_probs.detach() if x.old_log_probs is None else x.old_log_probs
    old = trainer
    if x.old_from_engine and x.rollout_log_probs is not None:
        old = x.rollout_log_probs
    token_kl = old - x.log_probs
    pg, mask = _policy_term(x, form, settings, token_kl, trainer, measured)
    # Denominators stay those of the loss mask: a rejected token must not give its weight to the others.
    masked_reducer = reducer.with_mask(mask)
    sums = measured.sums
    sums["pg_loss"] = loss = masked_reducer(pg) if pg_reducer is None else pg_reducer(pg, mask)
    if x.entropy is not None:
        sums["entropy"] = measured.mean(x.entropy)
        sums["entropy_loss"] = masked_reducer(x.entropy)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * sums["entropy_loss"]
    if settings.kl_loss_coef is not None and x.ref_log_probs is not None:
        ratio = torch.exp(-token_kl) if settings.unbiased_kl else None
        sums["kl_loss"] = masked_reducer(approx_kl(x.log_probs, x.ref_log_probs, settings.kl_kind, ratio))
        if settings.kl_loss_coef:
            loss = loss + settings.kl_loss_coef * sums["kl_loss"]
    if x.rollout_log_probs is not None:
        _measure_engine(trainer, x.rollout_log_probs, measured)
    return measured.objective(loss)


def _policy_term(
    x: PolicyInputs,
    form: PolicyForm,
    settings: ObjectiveSettings,
    token_kl: Tensor,
    trainer: Tensor,
    measured: _Measured,
) -> tuple[Tensor, Tensor]:
    """The token losses ``[R]`` of the policy after masking and correction, and the mask that is left."""
    mean, sums = measured.mean, measured.sums
    ppo_kl = sequence_kl(token_kl, x.mask, x.lengths) if form.sequence_ratio else token_kl
    pg, clipped = form.loss(ppo_kl, x.log_probs, x.advantages, settings.clip)
    sums |= {"pg_clipfrac": mean(clipped), "ppo_kl": mean(ppo_kl)}
    ratio = torch.exp(-ppo_kl.detach())
    measured.add_range("ratio", ratio)
    if settings.clip.dual is not None and form.dual_clip:
        sums["pg_clipfrac_lower"] = mean(((x.advantages < 0) & (ratio > settings.clip.dual)).to(pg.dtype))
    if settings.opsm_delta is not None:
        kept, sums["opsm_clipfrac"] = off_policy_sequence_mask(
            token_kl, x.advantages, x.mask, x.lengths, settings.opsm_delta
        )
        pg = pg * kept
    mask, dropped = x.mask, torch.zeros_like(x.mask)
    if settings.correction is not None and x.rollout_log_probs is not None:
        gap = EngineGap(trainer=trainer, engine=x.rollout_log_probs, mask=x.mask, lengths=x.lengths)
        corrected = settings.correction(pg, gap)
        pg = corrected.loss
        if corrected.mask is not None:
            mask, dropped = corrected.mask, x.mask - x.mask * corrected.mask
        if corrected.dropped is not None:
            dropped = torch.maximum(dropped, corrected.dropped)
        sums |= {name: mean(value) for name, value in corrected.metrics.items()}
        sums["ois"] = mean(ratio)
    sums["rejected_frac"] = mean(dropped)
    return pg, mask


def _measure_engine(trainer: Tensor, engine: Tensor, measured: _Measured) -> None:
    """Distance of the trainer's old log-probs and the engine's."""
    difference = (trainer - engine).abs()
    measured.sums |= engine_sums(trainer, engine, measured.mean)
    measured.maxima[f"{ABS_DIFF}_max"] = extremes(difference, measured.mean.mask)[1]
    measured.histograms[ABS_DIFF] = log_histogram(difference, measured.mean.mask)
    measured.add_range("train_rollout_ratio", torch.exp(trainer - engine))


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
