"""The loss of one micro-batch: which one the flags ask for, from scores and columns to sums.

Owns the choice between policy, value, supervised and custom loss and its inputs. Scaling for Megatron and
reduction over ranks are ``step``'s. Tests hold: the policy loss equals a float64 reference over
transformers' logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slime.algorithms import ALGORITHMS
from slime.algorithms.losses import sft_loss, value_loss
from slime.algorithms.objective import (
    ClipRange,
    Objective,
    ObjectiveSettings,
    PolicyInputs,
    policy_objective,
)
from slime.algorithms.reduction import TokenReducer, blank_masked
from slime.backends.megatron.batches import MicroBatch
from slime.backends.megatron.engine_correction import correction_for
from slime.backends.megatron.hooks import TrainHooks, pg_reducer_for
from slime.backends.megatron.logprobs import TokenScores
from slime.backends.megatron.rollout_columns import Column, RolloutColumns, to_hook_data
from slime.config import Config
from slime.config.sections import AlgorithmConfig
from slime.errors import DataError, PluginError
from slime.types import RolloutBatch

NLL = "nll"
"""Metric of supervised losses; its sums are over tokens, however the loss weighs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContext:
    """What losses need beside the scores; the same for all micro-batches of a rollout.

    ``weight_normaliser`` divides the engine / trainer weights; see ``engine_correction``.
    """

    config: Config
    hooks: TrainHooks
    batch: RolloutBatch
    columns: RolloutColumns
    old_from_engine: bool = False
    weight_normaliser: float = 1.0

    def reducer(self, micro_batch: MicroBatch) -> TokenReducer:
        """How the flags weigh tokens in the loss."""
        constant = self.config.algorithm.constant_loss_denominator
        if constant is not None:
            return TokenReducer.constant(self.mask(micro_batch), constant)
        return self.metric_reducer(micro_batch)

    def metric_reducer(self, micro_batch: MicroBatch) -> TokenReducer:
        """How the flags weigh tokens in a mean."""
        mask = self.mask(micro_batch)
        if self.config.algorithm.calculate_per_token_loss:
            return TokenReducer.per_token(mask)
        sums = [self.batch.rollout_mask_sums[i] for i in micro_batch.samples] or [1.0]
        return TokenReducer.per_rollout(mask, sums, micro_batch.response_lengths)

    @property
    def has_metrics_of_users(self) -> bool:
        """Whether a user's function names metrics of the loss, perhaps others in another micro-batch."""
        return self.hooks.loss is not None or self.hooks.tis is not None

    def mask(self, micro_batch: MicroBatch) -> Tensor:
        """``[R]`` loss mask; all zero for a placeholder."""
        return micro_batch.flatten(self.columns.masks)


def objective_settings(config: Config) -> ObjectiveSettings:
    """The coefficients of the objective, without a correction."""
    algorithm = config.algorithm
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    return ObjectiveSettings(
        clip=ClipRange(low=algorithm.eps_clip, high=high, dual=algorithm.eps_clip_c),
        entropy_coef=algorithm.entropy_coef,
        kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else None,
        kl_kind=algorithm.kl_loss_type,
        unbiased_kl=algorithm.use_unbiased_kl,
        opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
    )


def policy_loss(context: LossContext, micro_batch: MicroBatch, scores: TokenScores) -> Objective:
    """The estimator's policy objective."""
    columns, algorithm = context.columns, context.config.algorithm
    if columns.advantages is None:
        raise DataError("the policy loss needs advantages; remove --disable-compute-advantages-and-returns")
    if columns.rollout_log_probs is None:
        _check_engine_is_not_needed(algorithm)
    reducer = context.reducer(micro_batch)

    def flat(column: Column | None) -> Tensor | None:
        return None if column is None else micro_batch.flatten(column)

    inputs = PolicyInputs(
        log_probs=scores.log_probs,
        entropy=scores.entropy,
        advantages=micro_batch.flatten(columns.advantages),
        mask=reducer.mask,
        lengths=micro_batch.response_lengths,
        old_log_probs=flat(columns.old_log_probs),
        rollout_log_probs=flat(columns.rollout_log_probs),
        ref_log_probs=flat(columns.ref_log_probs),
        old_from_engine=context.old_from_engine,
    )
    correction = correction_for(algorithm, context.hooks, micro_batch, reducer.mask, context.weight_normaliser)
    objective = policy_objective(
        inputs,
        ALGORITHMS[algorithm.advantage_estimator].form,
        replace(objective_settings(context.config), correction=correction),
        reducer,
        pg_reducer_for(context.hooks, micro_batch, per_token=algorithm.calculate_per_token_loss),
        context.metric_reducer(micro_batch),
    )
    if algorithm.use_tis and algorithm.tis_batch_normalize:
        objective.maxima["batch_norm_factor"] = objective.loss.new_tensor(1 / context.weight_normaliser)
    if columns.opd_reverse_kl is not None:
        objective.sums["opd_reverse_kl"] = context.metric_reducer(micro_batch)(
            micro_batch.flatten(columns.opd_reverse_kl)
        )
    return objective


def _check_engine_is_not_needed(algorithm: AlgorithmConfig) -> None:
    wants = {
        "--use-tis": algorithm.use_tis,
        "--use-icepop": algorithm.use_icepop,
        "--use-rs": algorithm.use_rs,
        "--use-rollout-logprobs": algorithm.use_rollout_logprobs,
        "--get-mismatch-metrics": algorithm.get_mismatch_metrics,
    }
    flag = next((flag for flag, is_set in wants.items() if is_set), None)
    if flag is not None:
        raise DataError(f"{flag}: the samples carry no rollout_log_probs; the generate function must record them")


def supervised_loss(context: LossContext, micro_batch: MicroBatch, scores: TokenScores) -> Objective:
    """Negative log-likelihood of the unmasked response tokens."""
    reducer = context.reducer(micro_batch)
    losses = sft_loss(blank_masked(scores.log_probs, reducer.mask))
    loss = reducer(losses)
    return Objective(
        loss=loss, sums={"loss": loss.detach(), NLL: TokenReducer.per_token(reducer.mask)(losses).detach()}
    )


def critic_loss(context: LossContext, micro_batch: MicroBatch, values: Tensor) -> Objective:
    """PPO's clipped value loss of ``[R]`` values."""
    columns = context.columns
    assert columns.values is not None, "old values come with the batch"
    assert columns.returns is not None, "returns come with the batch"
    reducer, means = context.reducer(micro_batch), context.metric_reducer(micro_batch)
    blank = [
        blank_masked(x, reducer.mask)
        for x in (values, micro_batch.flatten(columns.values), micro_batch.flatten(columns.returns))
    ]
    token_loss, clipped = value_loss(*blank, context.config.algorithm.value_clip)
    loss = reducer(token_loss)
    sums = {"loss": loss.detach(), "value_loss": loss.detach(), "value_clipfrac": means(clipped).detach()}
    return Objective(loss=loss, sums=sums)


def custom_loss(context: LossContext, micro_batch: MicroBatch, logits: Tensor) -> Objective:
    """The user's loss on fp32 logits ``[1, T, V/tp]`` of every token of the row."""
    function = context.hooks.loss
    assert function is not None
    reducer = context.reducer(micro_batch)
    if not micro_batch.samples:
        nothing = logits.sum() * 0
        return Objective(loss=nothing, sums={})
    data = to_hook_data(context.batch, context.columns, micro_batch.samples)
    result: Any = function(context.hooks.args, data, logits.float()[None], reducer)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise PluginError("--custom-loss-function-path must return (loss tensor, dict of metric tensors)")
    loss, metrics = result
    loss = loss if loss.requires_grad else loss + logits.sum() * 0
    return Objective(loss=loss, sums=_metric_sums(loss, metrics))


def _metric_sums(loss: Tensor, metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    values = {name: torch.as_tensor(value, device=loss.device).detach().float() for name, value in metrics.items()}
    return {"loss": loss.detach().float()} | values
