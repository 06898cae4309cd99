"""Training on one rollout: plan, score, advantages, optimizer steps, metrics.

Owns the order of these and what travels between them; the orchestrating ``train`` is the picture.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import distributed as dist

from slime.backends.megatron.batches import MicroBatch, RowSettings, build_micro_batch, packing_lengths
from slime.backends.megatron.checks import check_step
from slime.backends.megatron.hooks import TrainHooks
from slime.backends.megatron.kept_tokens import check_kept_tokens
from slime.backends.megatron.loss import LossContext
from slime.backends.megatron.passes import ModelPasses
from slime.backends.megatron.rollout_columns import Column, RolloutColumns, from_hook_data, to_hook_data
from slime.backends.megatron.scoring import PassPlan, compute_advantages, plan_passes, score_rollout
from slime.backends.megatron.skip_guard import SkipGuard
from slime.backends.megatron.snapshots import WeightSnapshot
from slime.backends.megatron.step import Denominators, TrainStep
from slime.config import Config
from slime.data.packing import (
    DPSchedule,
    Lengths,
    PackingSettings,
    StepPlan,
    build_dp_schedule,
    repack,
    sequence_costs,
)
from slime.observability.metrics import reduce_metrics
from slime.observability.timers import Timer
from slime.types import RolloutBatch

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """A rollout cut up for this rank.

    Args:
        schedule: All ranks' shares.
        samples: This rank's samples in the order in which it meets them.
        train: Micro-batches of each optimizer step.
        score: Micro-batches of forward-only passes, over all steps.
    """

    schedule: DPSchedule
    samples: list[int]
    train: list[list[MicroBatch]]
    score: list[MicroBatch]


class RolloutTrainer:
    """Trains rollouts with one model on one rank.

    Args:
        config: The resolved configuration.
        passes: The model.
        step: Its optimizer step.
        hooks: Users' functions.
        timer: Gets ``data_preprocess``, ``{ref,teacher}_log_probs``, ``log_probs``, ``actor_train`` and ``train``.
        reference: Weights of the reference policy, if a pass needs them.
        teacher: Weights that on-policy distillation learns from, if the trainer holds them.
        old_actor: Weights that generated the rollout, with ``--keep-old-actor``.
    """

    def __init__(
        self,
        config: Config,
        passes: ModelPasses,
        step: TrainStep,
        hooks: TrainHooks,
        timer: Timer,
        *,
        reference: WeightSnapshot | None = None,
        teacher: WeightSnapshot | None = None,
        old_actor: WeightSnapshot | None = None,
    ) -> None:
        self._config = config
        self._passes = passes
        self._parallel = passes.parallel
        self._step = step
        self._hooks = hooks
        self._timer = timer
        self._reference = reference
        self._teacher = teacher
        self._old_actor = old_actor
        self._packing = _packing_settings(config, passes)
        self._skips = SkipGuard(config.train.max_skipped_steps)
        self._share_prompts = shares_prompts(config, self._parallel.cp_size)
        self._rows = RowSettings.of(
            self._parallel,
            share_prompts=self._share_prompts,
            every_position=config.algorithm.loss_type == "custom_loss",
            sequence_parallel=config.megatron.sequence_parallel,
            pad_multiplier=config.data.data_pad_size_multiplier,
            dtype=_DTYPES[config.train.precision],
        )
        self.step_metrics: list[dict[str, float]] = []

    def train(self, batch: RolloutBatch) -> dict[str, float]:
        """Train one rollout. Collective over all training ranks.

        Returns:
            ``train/*`` of all steps by their declared reduction and ``rollout/*``.
        """
        with self._timer.context("train"):
            with self._timer.context("data_preprocess"):
                plan = self._plan(batch)
                columns = RolloutColumns.of(batch, plan.samples, self._parallel.device)
            pass_plan = plan_passes(self._config, num_steps=len(plan.schedule.steps))
            with self._passes.routing.rollout(batch, plan.samples):
                self._score(plan, columns, pass_plan)
                self._estimate(batch, plan, columns)
                context = LossContext(
                    config=self._config,
                    hooks=self._hooks,
                    batch=batch,
                    columns=columns,
                    old_from_engine=pass_plan.old_from_engine,
                )
                with self._passes.routing.training():
                    current = self._optimize(context, plan)
            return reduce_metrics(self.step_metrics) | self._rollout_metrics(batch, plan, columns, current)

    def _plan(self, batch: RolloutBatch) -> RolloutPlan:
        # The whole batch on every rank, so that all of them refuse it.
        self._passes.routing.check(batch)
        check_kept_tokens(
            batch, vocab_size=self._config.megatron.vocab_size, truncated_by=truncating_flags(self._config)
        )
        lengths = packing_lengths(batch, share_prompts=self._rows.share_prompts)
        costs = _sample_costs(self._config, batch.total_lengths) if self._packing.balance == "cost" else None
        schedule = build_dp_schedule(batch.rollout_ids, lengths, self._packing, costs)
        if schedule.num_dropped_samples:
            logger.warning(
                "rollout %d: %d samples do not fill an optimizer step of --global-batch-size %d and are dropped",
                batch.rollout_id,
                schedule.num_dropped_samples,
                self._packing.global_batch_size,
            )
        rank = self._parallel.dp_rank
        train = [self._build(batch, step, rank) for step in schedule.steps]
        return RolloutPlan(
            schedule=schedule,
            samples=schedule.rank_samples(rank),
            train=train,
            score=self._scoring_batches(batch, schedule, lengths, train),
        )

    def _build(self, batch: RolloutBatch, step: StepPlan, rank: int) -> list[MicroBatch]:
        return [build_micro_batch(batch, s, self._rows, self._parallel) for s in step.micro_batches[rank]]

    def _scoring_batches(
        self, batch: RolloutBatch, schedule: DPSchedule, lengths: Lengths, train: Sequence[Sequence[MicroBatch]]
    ) -> list[MicroBatch]:
        """The training micro-batches again, unless forward-only passes have a token cap of their own."""
        cap, train_cap = self._config.data.log_probs_max_tokens_per_gpu, self._config.data.max_tokens_per_gpu
        if self._packing.max_tokens is None or cap is None or cap == train_cap:
            return [micro_batch for step in train for micro_batch in step]
        repacked = repack(
            schedule, lengths, cap * self._parallel.cp_size, micro_batch_group=self._packing.micro_batch_group
        )
        return self._build(batch, repacked.steps[0], self._parallel.dp_rank)

    def _score(self, plan: RolloutPlan, columns: RolloutColumns, pass_plan: PassPlan) -> None:
        """Forward-only passes; results only on the last pipeline stage."""
        if pass_plan.ref:
            assert self._reference is not None, "the worker keeps a reference when a pass needs one"
            columns.ref_log_probs, _ = self._score_with("ref_", self._reference, plan)
        if pass_plan.teacher:
            assert self._teacher is not None, "the worker keeps a teacher when a pass needs one"
            columns.teacher_log_probs, _ = self._score_with("teacher_", self._teacher, plan)
        if pass_plan.old:
            with_entropy = self._config.algorithm.use_rollout_entropy
            with self._passes.routing.old_pass():
                columns.old_log_probs, columns.entropy = self._score_with("", self._old_actor, plan, with_entropy)

    def _score_with(
        self, prefix: str, weights: WeightSnapshot | None, plan: RolloutPlan, with_entropy: bool = False
    ) -> tuple[Column, Column | None]:
        chunks = self._passes.chunks
        lent: AbstractContextManager[None] = contextlib.nullcontext() if weights is None else weights.lent_to(chunks)
        with self._timer.context(f"{prefix}log_probs"), lent:
            if self._hooks.before_log_prob:
                self._hooks.before_log_prob(self._hooks.args, chunks, prefix)
            return score_rollout(self._passes, plan.score, with_entropy=with_entropy)

    def _estimate(self, batch: RolloutBatch, plan: RolloutPlan, columns: RolloutColumns) -> None:
        if not self._parallel.is_pp_last:
            return
        if self._config.algorithm.compute_advantages_and_returns:
            compute_advantages(
                self._config, batch, columns, plan.samples, self._parallel, self._hooks.advantage, self._hooks.args
            )
        if self._hooks.rollout_data_postprocess:
            data = to_hook_data(batch, columns, plan.samples)
            self._hooks.rollout_data_postprocess(self._hooks.args, batch.rollout_id, data)
            from_hook_data(data, batch, columns, plan.samples, flag="--rollout-data-postprocess-path")

    def _optimize(self, context: LossContext, plan: RolloutPlan) -> Column:
        """All optimizer steps; returns the log-probs that each sample had when its step began."""
        batch, steps = context.batch, plan.schedule.steps
        self.step_metrics = []
        current: Column = {}
        if self._config.algorithm.reset_optimizer_states:
            self._step.reset_states()
        with self._timer.context("actor_train"):
            for step_id, (step, micro_batches) in enumerate(zip(steps, plan.train, strict=True)):
                if self._hooks.before_train_step:
                    self._hooks.before_train_step(
                        self._hooks.args,
                        batch.rollout_id,
                        step_id,
                        self._passes.chunks,
                        self._step.optimizer,
                        self._step.scheduler,
                    )
                result = self._step.run(context, micro_batches, _denominators(self._config, batch, step))
                current |= result.log_probs
                metrics = {f"train/{name}": value for name, value in result.metrics.items()}
                metrics["train/step"] = float(batch.rollout_id * len(steps) + step_id)
                check_step(self._config, metrics, rollout_id=batch.rollout_id, step_id=step_id)
                self.step_metrics.append(metrics)
                self._skips.note(result.skip, rollout_id=batch.rollout_id, step_id=step_id)
        return current

    def _rollout_metrics(
        self, batch: RolloutBatch, plan: RolloutPlan, columns: RolloutColumns, current: Column
    ) -> dict[str, float]:
        """Per-rollout means of token columns over all ranks."""
        means: dict[str, float] = {}
        if self._parallel.is_pp_last:
            named: dict[str, Column | None] = {
                "log_probs": current if columns.old_log_probs is None else columns.old_log_probs,
                "ref_log_probs": columns.ref_log_probs,
                "rollout_log_probs": columns.rollout_log_probs,
                "teacher_log_probs": columns.teacher_log_probs,
                "opd_reverse_kl": columns.opd_reverse_kl,
                "entropy": columns.entropy,
                "advantages": columns.advantages,
                "returns": columns.returns,
            }
            means = self._token_means(batch, plan, columns.masks, {k: v for k, v in named.items() if v is not None})
        if self._parallel.pp_size > 1:
            holder = [means]
            source = dist.get_process_group_ranks(self._parallel.pp_group)[-1]
            dist.broadcast_object_list(holder, src=source, group=self._parallel.pp_group)
            means = holder[0]
        return {f"rollout/{name}": value for name, value in means.items()}

    def _token_means(
        self, batch: RolloutBatch, plan: RolloutPlan, masks: Column, columns: Mapping[str, Column]
    ) -> dict[str, float]:
        names = sorted(columns)
        sums = torch.zeros(len(names), dtype=torch.float64, device=self._parallel.device)
        for k, name in enumerate(names):
            if not columns[name]:
                continue
            for i in plan.samples:
                values = torch.where(masks[i].bool(), columns[name][i], 0.0)
                sums[k] += values.sum() / max(batch.rollout_mask_sums[i], 1.0)
        if self._parallel.dp_size > 1:
            dist.all_reduce(sums, group=self._parallel.dp_group)
        num_rollouts = sum(step.num_rollouts for step in plan.schedule.steps)
        return dict(zip(names, (sums / num_rollouts).tolist(), strict=True))


def truncating_flags(config: Config) -> str | None:
    """The flags by which the tokens of the policy loss were sampled from a truncated distribution."""
    if config.algorithm.loss_type != "policy_loss":
        return None
    rollout = config.rollout
    flags = [f"--rollout-top-p {rollout.rollout_top_p:g}"] if rollout.rollout_top_p != 1 else []
    flags += [f"--rollout-top-k {rollout.rollout_top_k}"] if rollout.rollout_top_k != -1 else []
    return " ".join(flags) or None


def shares_prompts(config: Config, cp_size: int) -> bool:
    """``--share-prompt-prefix``; unset, prompts are shared where a row is not split over ranks."""
    chosen = config.train.share_prompt_prefix
    return cp_size == 1 if chosen is None else chosen


def _packing_settings(config: Config, passes: ModelPasses) -> PackingSettings:
    data, parallel = config.data, passes.parallel
    samples = data.rollout_batch_size * data.n_samples_per_prompt
    dynamic = data.max_tokens_per_gpu if data.use_dynamic_batch_size else None
    group = config.megatron.get("microbatch_group_size_per_vp_stage") or parallel.pp_size
    return PackingSettings(
        global_batch_size=data.global_batch_size or samples // config.num_steps_per_rollout,
        dp_size=parallel.dp_size,
        micro_batch_size=data.micro_batch_size,
        max_tokens=None if dynamic is None else dynamic * parallel.cp_size,
        micro_batch_group=group if parallel.vpp_size > 1 else 1,
        balance="cost" if data.balance_by_flops else "tokens" if data.balance_data else "none",
    )


def _sample_costs(config: Config, lengths: Sequence[int]) -> list[float]:
    """Forward FLOPs of each sample: matrix products per token, and scores and values per attended pair."""
    megatron = config.megatron
    heads = megatron.num_attention_heads * megatron.kv_channels
    key_values = megatron.num_query_groups * megatron.kv_channels
    gates = 3 if megatron.get("swiglu", False) else 2
    per_layer = megatron.hidden_size * (2 * heads + 2 * key_values + gates * megatron.ffn_hidden_size)
    per_token = 2.0 * megatron.num_layers * per_layer
    return sequence_costs(lengths, per_token=per_token, per_token_pair=4.0 * megatron.num_layers * heads)


def _denominators(config: Config, batch: RolloutBatch, step: StepPlan) -> Denominators:
    return Denominators(
        num_rollouts=step.num_rollouts,
        num_tokens=sum(max(int(batch.loss_masks[i].sum()), 1) for i in step.samples),
        per_token=config.algorithm.calculate_per_token_loss,
    )
