"""All optimizer steps of one rollout, for either role.

Owns what surrounds each step: the users' hook, the denominators, the checks, and the names of its numbers.
"""

from __future__ import annotations

from slime.backends.megatron.checks import check_step
from slime.backends.megatron.loss import LossContext
from slime.backends.megatron.passes import ModelPasses
from slime.backends.megatron.rollout_columns import Column
from slime.backends.megatron.rollout_plan import RolloutPlan, denominators
from slime.backends.megatron.skip_guard import SkipGuard
from slime.backends.megatron.step import TrainStep


def run_optimizer_steps(
    context: LossContext, plan: RolloutPlan, passes: ModelPasses, step: TrainStep, skips: SkipGuard
) -> tuple[list[dict[str, float]], Column, Column]:
    """Train every step of the plan. Collective over all training ranks.

    Returns:
        ``train/*`` of each step (``critic-train/*`` for a critic), and the log-probs and entropies that each
        sample had when its step began (none for a critic).
    """
    config, hooks, batch, steps = context.config, context.hooks, context.batch, plan.schedule.steps
    prefix = "critic-train" if config.role == "critic" else "train"
    rows: list[dict[str, float]] = []
    current: Column = {}
    entropy: Column = {}
    if config.algorithm.reset_optimizer_states:
        step.reset_states()
    for step_id, (planned, micro_batches) in enumerate(zip(steps, plan.train, strict=True)):
        if hooks.before_train_step:
            hooks.before_train_step(
                hooks.args, batch.rollout_id, step_id, passes.chunks, step.optimizer, step.scheduler
            )
        result = step.run(context, micro_batches, denominators(config, batch, planned))
        current |= result.log_probs
        entropy |= result.entropy
        metrics = {f"{prefix}/{name}": value for name, value in result.metrics.items()}
        metrics[f"{prefix}/step"] = float(batch.rollout_id * len(steps) + step_id)
        check_step(config, metrics, rollout_id=batch.rollout_id, step_id=step_id)
        rows.append(metrics)
        skips.note(result.skip, rollout_id=batch.rollout_id, step_id=step_id)
    return rows, current, entropy
