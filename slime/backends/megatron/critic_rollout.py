"""The critic's part in one rollout: values of all response tokens before the update, then training on returns.

Owns the order of its passes and the explained variance. Advantages and returns are the actor's
(``train_rollout``), which alone knows the KL penalty. Tests hold: values, loss, gradient norm and weights
equal a float64 reference, and do not depend on the layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from slime.backends.megatron.batches import MicroBatch
from slime.backends.megatron.hooks import TrainHooks
from slime.backends.megatron.loss import LossContext
from slime.backends.megatron.optimizer_steps import run_optimizer_steps
from slime.backends.megatron.passes import ModelPasses
from slime.backends.megatron.rollout_columns import Column, RolloutColumns, to_rows
from slime.backends.megatron.rollout_plan import RolloutPlan, RolloutPlanner
from slime.backends.megatron.skip_guard import SkipGuard
from slime.backends.megatron.step import TrainStep
from slime.config import Config
from slime.observability.metrics import reduce_metrics
from slime.observability.timers import Timer
from slime.types import Float32Array, RolloutBatch


class CriticTrainer:
    """Scores and trains rollouts with a value model on one rank.

    Args:
        config: The critic's configuration.
        passes: The value model.
        step: Its optimizer step.
        hooks: Users' functions.
        timer: Gets ``data_preprocess``, ``values`` and ``train``.
    """

    def __init__(self, config: Config, passes: ModelPasses, step: TrainStep, hooks: TrainHooks, timer: Timer) -> None:
        self._config = config
        self._passes = passes
        self._parallel = passes.parallel
        self._step = step
        self._hooks = hooks
        self._timer = timer
        self._planner = RolloutPlanner(config, self._parallel)
        self._skips = SkipGuard(config.train.max_skipped_steps)
        self.step_metrics: list[dict[str, float]] = []

    def score(self, batch: RolloutBatch) -> dict[int, Float32Array]:
        """Values of the samples that this rank speaks for (see ``to_rows``). Collective over all training ranks."""
        with self._timer.context("data_preprocess"):
            plan = self._planner.plan(batch)
        with self._timer.context("values"):
            return to_rows(score_values(self._passes, plan.score), self._parallel)

    def train(self, batch: RolloutBatch) -> dict[str, float]:
        """Train on ``batch.returns``, near ``batch.values``. Collective over all training ranks.

        Returns:
            ``critic-train/*`` of all steps by their declared reduction.
        """
        with self._timer.context("train"):
            with self._timer.context("data_preprocess"):
                plan = self._planner.plan(batch)
                columns = RolloutColumns.of(batch, plan.samples, self._parallel.device)
            fit = self._explained_variance(plan, columns)
            context = LossContext(config=self._config, hooks=self._hooks, batch=batch, columns=columns)
            rows, _, _ = run_optimizer_steps(context, plan, self._passes, self._step, self._skips)
            self.step_metrics = [row | fit for row in rows]
            return reduce_metrics(self.step_metrics)

    def _explained_variance(self, plan: RolloutPlan, columns: RolloutColumns) -> dict[str, float]:
        """``1 - Var(returns - values) / Var(returns)`` of all trained tokens, before the update.

        1 is a perfect critic, 0 one that knows no more than the mean, below 0 a worse one. Left out where
        returns do not vary.
        """
        assert columns.values is not None
        assert columns.returns is not None
        masks = [columns.masks[i].bool() for i in plan.samples]
        returns = [columns.returns[i][mask].double() for i, mask in zip(plan.samples, masks, strict=True)]
        values = [columns.values[i][mask].double() for i, mask in zip(plan.samples, masks, strict=True)]
        errors = [r - v for r, v in zip(returns, values, strict=True)]
        spread, unexplained = self._variance(returns), self._variance(errors)
        return {"critic-train/explained_variance": 1.0 - unexplained / spread} if spread > 0 else {}

    def _variance(self, rows: list[Tensor]) -> float:
        """Population variance over all data-parallel ranks; in two passes, which keeps the digits."""
        empty = torch.zeros(0, dtype=torch.float64, device=self._parallel.device)
        flat = torch.cat([empty, *rows])
        count, total = self._sum(torch.stack([torch.ones_like(flat).sum(), flat.sum()])).tolist()
        if not count:
            return 0.0
        return float(self._sum((flat - total / count).square().sum())) / count

    def _sum(self, x: Tensor) -> Tensor:
        if self._parallel.dp_size > 1:
            dist.all_reduce(x, group=self._parallel.dp_group)
        return x


def score_values(passes: ModelPasses, micro_batches: list[MicroBatch]) -> Column:
    """Values of all response tokens under the weights now in the model.

    Collective over tensor-, context- and pipeline-parallel groups.

    Returns:
        A column; empty on all but the last pipeline stage.
    """

    def finish(micro_batch: MicroBatch, output: Tensor) -> dict[int, Tensor]:
        return micro_batch.unflatten(passes.values(micro_batch, output))

    found: Any = passes.run(micro_batches, finish, forward_only=True)
    return {i: values for part in found for i, values in part.items()}
