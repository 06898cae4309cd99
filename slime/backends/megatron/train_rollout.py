"""Training on one rollout: plan, score, advantages, optimizer steps, metrics.

Owns the order of these and what travels between them; the orchestrating ``train`` is the picture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import distributed as dist

from slime.backends.megatron.checks import check_rollout
from slime.backends.megatron.engine_correction import weight_normaliser
from slime.backends.megatron.hooks import TrainHooks
from slime.backends.megatron.kept_tokens import check_kept_tokens
from slime.backends.megatron.logprob_evidence import difference_pattern
from slime.backends.megatron.loss import LossContext
from slime.backends.megatron.optimizer_steps import run_optimizer_steps
from slime.backends.megatron.passes import ModelPasses
from slime.backends.megatron.rollout_columns import Column, RolloutColumns, from_hook_data, to_hook_data, to_rows
from slime.backends.megatron.rollout_plan import RolloutPlan, RolloutPlanner
from slime.backends.megatron.scoring import PassPlan, compute_advantages, plan_passes, score_rollout
from slime.backends.megatron.skip_guard import SkipGuard
from slime.backends.megatron.snapshots import WeightSnapshot
from slime.backends.megatron.step import TrainStep
from slime.backends.megatron.train_dump import save_train_dump
from slime.config import Config
from slime.errors import TrainerError
from slime.observability.logprob_monitor import DIFF_KEY, exceeds
from slime.observability.metrics import reduce_metrics
from slime.observability.timers import Timer
from slime.types import Float32Array, RolloutBatch


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

    After ``train`` and ``estimate``, ``returns`` holds the returns of the samples that this rank speaks for
    (see ``to_rows``).
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
        self._planner = RolloutPlanner(config, self._parallel)
        self._skips = SkipGuard(config.train.max_skipped_steps)
        self.step_metrics: list[dict[str, float]] = []
        self.returns: dict[int, Float32Array] = {}

    def train(self, batch: RolloutBatch) -> dict[str, float]:
        """Train one rollout. Collective over all training ranks.

        Returns:
            ``train/*`` of all steps by their declared reduction and ``rollout/*``.
        """
        with self._timer.context("train"), self._passes.routing.rollout():
            plan, columns = self._cut(batch)
            pass_plan = plan_passes(self._config, num_steps=len(plan.schedule.steps))
            self._score(plan, columns, pass_plan)
            self._estimate(batch, plan, columns)
            context = LossContext(
                config=self._config,
                hooks=self._hooks,
                batch=batch,
                columns=columns,
                old_from_engine=pass_plan.old_from_engine,
                weight_normaliser=weight_normaliser(self._config.algorithm, columns, plan.samples, self._parallel),
            )
            with self._timer.context("actor_train"), self._passes.routing.training():
                try:
                    self.step_metrics, current, entropy = run_optimizer_steps(
                        context, plan, self._passes, self._step, self._skips
                    )
                except TrainerError:  # all ranks refuse these numbers together: leave what led to them
                    self._dump(batch, plan, columns, {})
                    raise
            self._dump(batch, plan, columns, current)
            metrics = reduce_metrics(self.step_metrics) | self._rollout_metrics(batch, plan, columns, current)
            check_rollout(self._config, metrics, rollout_id=batch.rollout_id)
            if exceeds(metrics.get(DIFF_KEY, 0.0), self._config.algorithm.max_logprob_diff):
                metrics |= self._difference_pattern(plan, columns, current, entropy)
            return metrics

    def estimate(self, batch: RolloutBatch) -> dict[str, float]:
        """What ``train`` does before its first optimizer step, and nothing more. Collective over all training ranks.

        Returns:
            ``rollout/*`` without what only training knows; ``returns`` is set as by ``train``.
        """
        with self._timer.context("train"), self._passes.routing.rollout():
            plan, columns = self._cut(batch)
            if self._estimates_depend_on_policy:
                self._score(plan, columns, plan_passes(self._config, num_steps=len(plan.schedule.steps)))
            self._estimate(batch, plan, columns)
            self.step_metrics = []
            return self._rollout_metrics(batch, plan, columns, None)

    @property
    def _estimates_depend_on_policy(self) -> bool:
        algorithm, hooks = self._config.algorithm, self._hooks
        functions = hooks.advantage is not None or hooks.rollout_data_postprocess is not None
        return algorithm.kl_coef != 0 or algorithm.use_opd or functions

    def _cut(self, batch: RolloutBatch) -> tuple[RolloutPlan, RolloutColumns]:
        routing = self._passes.routing
        with self._timer.context("data_preprocess"):
            # The whole batch on every rank, so that all of them refuse it.
            routing.check(batch)
            check_kept_tokens(
                batch, vocab_size=self._config.megatron.vocab_size, truncated_by=truncating_flags(self._config)
            )
            plan = self._planner.plan(batch)
            routing.take(batch, plan.samples)
            return plan, RolloutColumns.of(batch, plan.samples, self._parallel.device)

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
        self.returns = {} if columns.returns is None else to_rows(columns.returns, self._parallel)

    def _dump(self, batch: RolloutBatch, plan: RolloutPlan, columns: RolloutColumns, current: Column) -> None:
        template = self._config.debug.save_debug_train_data
        if template is not None:
            save_train_dump(template, batch, plan, columns, current, self._parallel)

    def _difference_pattern(
        self, plan: RolloutPlan, columns: RolloutColumns, current: Column, entropy: Column
    ) -> dict[str, float]:
        """How the engine's log-probs differ from those of the weights before the first update."""
        assert columns.rollout_log_probs is not None, "the difference to them was measured"
        scored = current if columns.old_log_probs is None else columns.old_log_probs
        entropy = entropy if columns.entropy is None else columns.entropy
        return difference_pattern(
            scored, columns.rollout_log_probs, entropy, columns.masks, plan.samples, self._parallel
        )

    def _rollout_metrics(
        self, batch: RolloutBatch, plan: RolloutPlan, columns: RolloutColumns, current: Column | None
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
                "values": columns.values,
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
        return dict(zip(names, (sums / plan.num_rollouts).tolist(), strict=True))


def truncating_flags(config: Config) -> str | None:
    """The flags by which the tokens of the policy loss were sampled from a truncated distribution."""
    if config.algorithm.loss_type != "policy_loss":
        return None
    rollout = config.rollout
    flags = [f"--rollout-top-p {rollout.rollout_top_p:g}"] if rollout.rollout_top_p != 1 else []
    flags += [f"--rollout-top-k {rollout.rollout_top_k}"] if rollout.rollout_top_k != -1 else []
    return " ".join(flags) or None
