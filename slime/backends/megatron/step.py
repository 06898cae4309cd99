"""One optimizer step: backward passes, scaling, the guarded update.

Owns how a sum over local tokens becomes the exact global mean after everything Megatron multiplies
and divides by, and the refusal to apply an update that is not finite. Tests hold: loss, gradient norm
and updated weights do not depend on micro-batches, order, data, tensor or context parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.utils import get_model_config
from torch import Tensor

from slime.algorithms.objective import Objective
from slime.backends.megatron.batches import MicroBatch
from slime.backends.megatron.loss import NLL, LossContext, critic_loss, custom_loss, policy_loss, supervised_loss
from slime.backends.megatron.objective_metrics import reduce_objectives
from slime.backends.megatron.passes import ModelPasses
from slime.backends.megatron.rollout_columns import Column
from slime.backends.megatron.skip_guard import Skip, gradient_skip, loss_skip
from slime.backends.megatron.update_kernels import fuse_updates

MAX_NLL = 700.0
"""Above, the perplexity is no float any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What sums of one optimizer step are divided by; known before its first micro-batch.

    Args:
        num_rollouts: Trajectories of the step.
        num_tokens: Sum over its samples of their mask sum, each at least 1.
        per_token: Whether the loss is a mean over tokens.
    """

    num_rollouts: int
    num_tokens: int
    per_token: bool

    @property
    def of_metrics(self) -> int:
        """What a metric's sum is divided by."""
        return max(self.num_tokens if self.per_token else self.num_rollouts, 1)


@dataclass(kw_only=True)
class StepResult:
    """What one optimizer step did.

    Args:
        metrics: Without prefix; on every rank.
        skip: Why the update was not applied; None if it was.
        log_probs: Log-probs of this rank's response tokens before the update, on the last stage.
        entropy: Their entropies, where the loss needed them.
    """

    metrics: dict[str, float]
    skip: Skip | None
    log_probs: Column = field(default_factory=dict)
    entropy: Column = field(default_factory=dict)


def prepare_schedule(chunks: Sequence[Any], optimizer: Any) -> None:
    """Tell Megatron's schedules about loss scale, gradient reduction and its overlap, as its trainer does."""
    config = get_model_config(chunks[0])
    ddp_config = chunks[0].ddp_config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    # A NaN must lead to a skipped step that all ranks agree on, not to an exception in one of them.
    for chunk in chunks:
        chunk.ddp_config.check_for_nan_in_grad = False
    single = len(chunks) == 1
    if ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync[0] if single else no_sync


class TrainStep:
    """Runs optimizer steps of one model."""

    def __init__(self, passes: ModelPasses, optimizer: Any, scheduler: Any) -> None:
        self._passes = passes
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._parts = list(optimizer.chained_optimizers)
        if passes.parallel.device.type == "cuda":
            fuse_updates(optimizer)
        prepare_schedule(passes.chunks, optimizer)

    def run(self, context: LossContext, micro_batches: Sequence[MicroBatch], denominators: Denominators) -> StepResult:
        """Accumulate gradients over the micro-batches and update the weights.

        Collective over all training ranks.

        Args:
            context: Loss inputs of this rank's samples.
            micro_batches: This rank's; the same number on every rank.
            denominators: Of the whole step.
        """
        for chunk in self._passes.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        log_probs: Column = {}
        entropy: Column = {}
        objectives = self._accumulate(context, micro_batches, denominators, log_probs, entropy)
        metrics = reduce_objectives(
            objectives,
            denominators.of_metrics,
            self._passes.parallel,
            names_may_differ=context.has_metrics_of_users,
        )
        metrics |= _likelihood(metrics, denominators)
        skip, grad_norm = self._update(loss_skip(metrics))
        for index, group in enumerate(self.optimizer.param_groups):
            metrics[f"lr-pg_{index}"] = float(group["lr"])
        metrics["grad_norm"] = grad_norm
        metrics["global_batch_size"] = denominators.num_rollouts
        metrics["skipped_steps_count"] = float(skip is not None)
        if skip is None:
            self.scheduler.step(increment=denominators.num_rollouts)
        return StepResult(metrics=metrics, skip=skip, log_probs=log_probs, entropy=entropy)

    def reset_states(self) -> None:
        """Forget the moments of every parameter, as if the optimizer were new."""
        trained = [
            part.optimizer for part in self._parts if part.optimizer is not None
        ]  # None: no expert on this stage
        for optimizer in trained:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()

    def _accumulate(
        self,
        context: LossContext,
        micro_batches: Sequence[MicroBatch],
        denominators: Denominators,
        log_probs: Column,
        entropy: Column,
    ) -> list[Objective]:
        algorithm, passes = context.config.algorithm, self._passes
        critic = context.config.role == "critic"
        custom = algorithm.loss_type == "custom_loss" and not critic
        fused = passes.keeps_no_logits and not custom and not critic
        with_entropy = algorithm.loss_type == "policy_loss"
        loss_of = policy_loss if algorithm.loss_type == "policy_loss" else supervised_loss

        def finish(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Objective]:
            if critic:
                objective = critic_loss(context, micro_batch, passes.values(micro_batch, output))
            elif custom:
                objective = custom_loss(context, micro_batch, output)
            else:
                if fused:
                    scores = passes.unpack_fused(micro_batch, output, with_entropy=with_entropy)
                else:
                    scores = passes.score(micro_batch, output, with_entropy=with_entropy, reuse_logits=True)
                objective = loss_of(context, micro_batch, scores)
                log_probs.update(micro_batch.unflatten(scores.log_probs.detach()))
                if scores.entropy is not None:
                    entropy.update(micro_batch.unflatten(scores.entropy.detach()))
            scaled, count = self._scaled(context, micro_batch, objective.loss, denominators, len(micro_batches))
            return scaled, count, replace(objective, loss=objective.loss.detach())

        return passes.run(micro_batches, finish, forward_only=False, fused_scores=fused, with_entropy=with_entropy)

    def _scaled(
        self,
        context: LossContext,
        micro_batch: MicroBatch,
        loss: Tensor,
        denominators: Denominators,
        num_micro_batches: int,
    ) -> tuple[Tensor, Tensor]:
        """The loss Megatron gets, and the token count it divides by.

        Per token: gradients are summed over data and context parallelism and divided by the summed
        counts; a context-parallel group counts each sample cp times. Otherwise Megatron divides by
        the number of micro-batches and averages over dp x cp ranks, which is undone here.
        """
        parallel = self._passes.parallel
        if denominators.per_token:
            count = int(sum(_trained_tokens(context, micro_batch)))
            return loss * parallel.cp_size, torch.tensor(count, dtype=torch.int, device=loss.device)
        scale = num_micro_batches * parallel.dp_size * parallel.cp_size / denominators.num_rollouts
        return loss * scale, torch.ones((), dtype=torch.int, device=loss.device)

    def _update(self, skip: Skip | None) -> tuple[Skip | None, float]:
        """Clip and apply the gradients unless something is not finite; returns why not, and their norm."""
        optimizer = self.optimizer
        overflow = optimizer.prepare_grads()
        norm = math.inf if overflow else float(optimizer.get_grad_norm())
        if skip is None and not math.isfinite(norm):
            skip = gradient_skip(norm, self._poisoned(), scale_may_fall=bool(overflow) and self._scale_may_fall())
        if skip is not None:
            return skip, norm
        # optimizer.step() would do the same, but computes the norm after it can still refuse.
        for part in self._parts:
            parameters = part.get_parameters()
            if part.config.clip_grad > 0 and parameters:
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=part.config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        if not optimizer.step_with_ready_grads():
            skip = Skip(reason="the optimizer refused the update")
        for chunk in self._passes.chunks:
            if chunk.ddp_config.overlap_param_gather:
                # Later readers (snapshots, export, scoring) must not see half-gathered weights.
                chunk.start_param_sync(force_sync=True)
        return skip, norm

    def _scale_may_fall(self) -> bool:
        """Whether the loss scale is dynamic and has not reached its lower end."""
        options = self._parts[0].config
        return options.loss_scale is None and float(self.optimizer.get_loss_scale()) > options.min_loss_scale

    def _poisoned(self) -> list[str]:
        """Parameters of this rank whose gradient is not finite."""
        return [
            name.removeprefix("module.")
            for chunk in self._passes.chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and not parameter.main_grad.isfinite().all()
        ]


def _likelihood(metrics: dict[str, float], denominators: Denominators) -> dict[str, float]:
    """Of a supervised step: the mean negative log-likelihood of its tokens, and the perplexity."""
    if NLL not in metrics:
        return {}
    nll = metrics[NLL] * denominators.of_metrics / max(denominators.num_tokens, 1)
    return {NLL: nll, "perplexity": math.exp(min(nll, MAX_NLL))}


def _trained_tokens(context: LossContext, micro_batch: MicroBatch) -> list[float]:
    """Mask sum of each sample, at least 1."""
    return [max(float(context.batch.loss_masks[i].sum()), 1.0) for i in micro_batch.samples]
