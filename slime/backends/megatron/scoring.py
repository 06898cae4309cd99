"""What is known about a rollout before the first optimizer step: which forward passes run, and their results.

Owns the rules for skipping the old-policy pass, the forward-only passes, and the advantages made from
them. Tests hold: the old pass is skipped exactly when current and old policy are the same; scores do
not depend on how samples are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from slime.algorithms import ALGORITHMS
from slime.algorithms.advantages import AdvantageInputs, reverse_kl
from slime.algorithms.kl import approx_kl
from slime.algorithms.reduction import blank_masked, whiten
from slime.backends.megatron.batches import MicroBatch
from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.passes import ModelPasses
from slime.backends.megatron.rollout_columns import Column, RolloutColumns, from_hook_data, to_hook_data
from slime.config import Config
from slime.errors import DataError, PluginError
from slime.types import RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """Which forward-only passes a rollout needs.

    Args:
        ref: Reference log-probs.
        teacher: Log-probs of a teacher whose weights the trainer holds.
        old: Log-probs of the policy before the update.
        old_from_engine: The engine's log-probs are the old ones for the loss.
    """

    ref: bool
    teacher: bool
    old: bool
    old_from_engine: bool


def plan_passes(config: Config, *, num_steps: int) -> PassPlan:
    """Decide which forward-only passes run for a rollout of ``num_steps`` optimizer steps.

    With a single step the policy that is updated is the one being differentiated, so its own detached
    log-probs are the old ones, unless something else needs them before that step. Batch normalisation of
    importance weights (``--tis-batch-normalize``) does: their mean over the whole rollout must be known
    before the first micro-batch, so it costs an old-policy pass. Rejection (``--use-rs``) compares the
    trainer with the engine also where the engine's log-probs are the old ones of the loss.
    """
    algorithm = config.algorithm
    spec = ALGORITHMS[algorithm.advantage_estimator]
    if not algorithm.compute_advantages_and_returns:
        return PassPlan(ref=False, teacher=False, old=False, old_from_engine=False)
    replays_own_routing = algorithm.use_routing_replay and not algorithm.use_rollout_routing_replay
    same_policy = (
        num_steps == 1
        and algorithm.loss_type == "policy_loss"
        and algorithm.kl_coef == 0
        and not algorithm.get_mismatch_metrics
        and not (algorithm.use_tis and algorithm.tis_batch_normalize)
        and not spec.needs_critic
        and not config.rollout.keep_old_actor
        and not algorithm.use_opd
        and not spec.needs_old_log_probs
    )
    compares_trainer = algorithm.get_mismatch_metrics or algorithm.use_rs
    engine_is_enough = algorithm.use_rollout_logprobs and not compares_trainer
    return PassPlan(
        ref=algorithm.kl_coef != 0 or algorithm.use_kl_loss,
        teacher=algorithm.use_opd and algorithm.opd_type == "megatron",
        # Own routes come from the old pass, whosever log-probs are the old ones for the loss.
        old=replays_own_routing or (not same_policy and not engine_is_enough),
        old_from_engine=algorithm.use_rollout_logprobs,
    )


def score_rollout(
    passes: ModelPasses, micro_batches: Sequence[MicroBatch], *, with_entropy: bool = False
) -> tuple[Column, Column | None]:
    """Log-probs (and entropy) of all response tokens under the weights now in the model.

    Collective over tensor-, context- and pipeline-parallel groups.

    Returns:
        Columns; empty on all but the last pipeline stage.
    """
    fused = passes.keeps_no_logits

    def finish(micro_batch: MicroBatch, output: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        read = passes.unpack_fused if fused else passes.score
        scores = read(micro_batch, output, with_entropy=with_entropy)
        entropy = {} if scores.entropy is None else micro_batch.unflatten(scores.entropy)
        return micro_batch.unflatten(scores.log_probs), entropy

    log_probs: Column = {}
    entropies: Column = {}
    passed = passes.run(micro_batches, finish, forward_only=True, fused_scores=fused, with_entropy=with_entropy)
    for found, entropy in passed:
        log_probs |= found
        entropies |= entropy
    return log_probs, entropies if with_entropy else None


CustomAdvantages = Callable[[Any, dict[str, Any]], None]


def compute_advantages(
    config: Config,
    batch: RolloutBatch,
    columns: RolloutColumns,
    samples: Sequence[int],
    parallel: ParallelState,
    custom: CustomAdvantages | None = None,
    plugin_args: Any = None,
) -> None:
    """Fill ``kl``, ``advantages`` and ``returns`` of this rank's samples.

    Collective over the data-parallel group when advantages are whitened. Runs on the last pipeline
    stage only, where the log-probs are.

    Raises:
        DataError: On-policy distillation without teacher log-probs.
        PluginError: A custom function did not set advantages and returns.
    """
    algorithm = config.algorithm
    columns.kl = _token_kl(config, columns)
    if custom is not None:
        flag = "--custom-advantage-function-path"
        data = to_hook_data(batch, columns, samples)
        custom(plugin_args, data)
        missing = [name for name in ("advantages", "returns") if name not in data]
        if missing:
            raise PluginError(f"{flag}: the function did not set rollout_data[{missing[0]!r}]")
        from_hook_data(data, batch, columns, samples, flag=flag)
    else:
        found = ALGORITHMS[algorithm.advantage_estimator].estimate(
            AdvantageInputs(
                rewards=[batch.rewards[i] for i in samples],
                kl=[columns.kl[i] for i in samples],
                masks=[columns.masks[i] for i in samples],
                values=None if columns.values is None else [columns.values[i] for i in samples],
                kl_coef=algorithm.kl_coef,
                gamma=algorithm.gamma,
                lambd=algorithm.lambd,
            )
        )
        columns.advantages = dict(zip(samples, found.advantages, strict=True))
        columns.returns = dict(zip(samples, found.returns, strict=True))
    assert columns.advantages is not None
    rows = [columns.advantages[i] for i in samples]
    if algorithm.use_opd:
        columns.opd_reverse_kl = _reverse_kl(config, columns, samples)
        gaps = columns.opd_reverse_kl
        rows = [row - algorithm.opd_kl_coef * gaps[i] for i, row in zip(samples, rows, strict=True)]
    if algorithm.normalize_advantages:
        rows = whiten(rows, [columns.masks[i] for i in samples], all_reduce=_sum_over(parallel))
    columns.advantages = dict(zip(samples, rows, strict=True))


def _token_kl(config: Config, columns: RolloutColumns) -> Column:
    if config.algorithm.kl_coef == 0 or columns.ref_log_probs is None:
        return {i: torch.zeros_like(mask) for i, mask in columns.masks.items()}
    current = _acting_log_probs(config, columns)
    kind = config.algorithm.kl_loss_type
    found = {i: approx_kl(current[i], ref, kind) for i, ref in columns.ref_log_probs.items()}
    if config.algorithm.use_rollout_logprobs:
        # What others wrote (tools, templates) the engine never scored: its log-probs there mean nothing.
        found = {i: blank_masked(kl, columns.masks[i]) for i, kl in found.items()}
    return found


def _acting_log_probs(config: Config, columns: RolloutColumns) -> Column:
    """Log-probs of the policy that wrote the samples, as the loss takes them for the old ones."""
    if not config.algorithm.use_rollout_logprobs:
        assert columns.old_log_probs is not None, "a KL penalty or a teacher needs the old-policy pass"
        return columns.old_log_probs
    if columns.rollout_log_probs is None:
        raise DataError(
            "--use-rollout-logprobs: the samples carry no rollout_log_probs; the generate function must record them"
        )
    return columns.rollout_log_probs


def _reverse_kl(config: Config, columns: RolloutColumns, samples: Sequence[int]) -> Column:
    student, teacher = _acting_log_probs(config, columns), columns.teacher_log_probs
    if teacher is None:
        raise DataError(
            "--use-opd: the samples carry no teacher log-probs; with --opd-type sglang the functions of "
            "slime.rollout.on_policy_distillation, or your own, set sample.teacher_log_probs of every sample"
        )
    return {i: reverse_kl(student[i], teacher[i], columns.masks[i]) for i in samples}


def _sum_over(parallel: ParallelState) -> Callable[[Tensor], Tensor]:
    def all_reduce(x: Tensor) -> Tensor:
        if parallel.dp_size > 1:
            x = x.to(parallel.device)
            dist.all_reduce(x, group=parallel.dp_group)
        return x

    return all_reduce
