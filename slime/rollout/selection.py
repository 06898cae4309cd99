"""Which groups of a training rollout are delivered.

Owns the count of kept, dropped and surplus groups, and the data source as the rollout sees it.
Tests hold the drop rule, the warning and the stop for filters that drop everything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from slime.errors import DataError, PluginError
from slime.rollout.context import GroupTask, RolloutContext
from slime.rollout.filters import MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.progress import Progress
from slime.rollout.types import RolloutGroup, iter_samples
from slime.types import Sample, Status

logger = logging.getLogger(__name__)

# A filter that drops this many groups per group wanted will not find what it looks for.
WARN_DROPPED_PER_TARGET = 10
MAX_DROPPED_PER_TARGET = 100


class GroupSource:
    """The data source as a callable too: ``source(n)`` is ``source.get_samples(n)``.

    Args:
        source: A data source, or a bare ``get_samples`` function.
        group_size: Samples per group (``--n-samples-per-prompt``).
    """

    def __init__(self, source: Any, group_size: int) -> None:
        self._source = source
        self._group_size = group_size
        self._get: Callable[[int], list[list[Sample]]] = source if callable(source) else source.get_samples

    def __call__(self, num_groups: int) -> list[list[Sample]]:
        """The next ``num_groups`` prompts."""
        return self.get_samples(num_groups)

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next ``num_groups`` prompts.

        Raises:
            PluginError: Not a list of groups of the right size.
        """
        groups = self._get(num_groups)
        if not isinstance(groups, list):
            raise PluginError(
                f"--data-source-path: get_samples must return a list of groups, found {type(groups).__name__}"
            )
        for group in groups:
            if not isinstance(group, list) or len(group) != self._group_size:
                found = f"{len(group)} samples" if isinstance(group, list) else type(group).__name__
                raise PluginError(
                    f"--data-source-path: get_samples must return groups (lists) of {self._group_size} samples "
                    f"(--n-samples-per-prompt), found {found}"
                )
        return groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class Selection:
    """What has been kept, dropped and seen so far.

    Args:
        context: The rollout's handle.
        progress: Display to keep up to date.
    """

    def __init__(self, context: RolloutContext, progress: Progress) -> None:
        self._context = context
        self._progress = progress
        self._target: int = context.args.rollout_batch_size
        self._drops = MetricGatherer()
        self._warn_at = WARN_DROPPED_PER_TARGET * self._target
        self.kept: list[RolloutGroup] = []
        self.seen: list[RolloutGroup] = []
        self.surplus: list[GroupTask] = []

    @property
    def is_complete(self) -> bool:
        """Whether as many groups are kept as are wanted."""
        return len(self.kept) >= self._target

    def take(self, task: GroupTask) -> None:
        """Keep or drop the finished group of a task; what comes after the last one wanted is surplus.

        Raises:
            DataError: The filter has dropped far more than it kept.
        """
        args, turn = self._context.args, self._context.turn
        group = task.result()
        self.seen.append(group)
        verdict = call_dynamic_filter(self._context.hooks.dynamic_filter, args, group)
        if should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=turn.remaining_batch_size, target_batch_size=self._target
        ):
            self._drops.on_dynamic_filter_drop(verdict.reason)
            turn.inputs.pop(task)
            turn.remaining_batch_size -= 1
            self._check_drops()
            return
        if self.is_complete:  # finished together with the last one wanted
            self.surplus.append(task)
            return
        self.kept.append(group)
        turn.inputs.pop(task)
        self._progress.update(1, scalar_rewards(args, group))

    def _check_drops(self) -> None:
        dropped = self._drops.num_dropped
        if dropped < self._warn_at:
            return
        counts = ", ".join(f"{k.rpartition('drop_')[2]}: {v}" for k, v in self._drops.collect().items())
        report = (
            f"--dynamic-sampling-filter-path {self._context.args.dynamic_sampling_filter_path} has dropped {dropped} "
            f"groups and kept {len(self.kept)} of {self._target} wanted ({counts})"
        )
        if dropped >= MAX_DROPPED_PER_TARGET * self._target:
            raise DataError(f"{report}; use easier or more varied prompts, more samples per prompt, or another filter")
        self._warn_at += WARN_DROPPED_PER_TARGET * self._target
        logger.warning("%s", report)

    def metrics(self, num_unfinished: int) -> dict[str, Any]:
        """Counts of the selection, for the rollout's log line."""
        metrics: dict[str, Any] = dict(self._drops.collect())
        counts = {
            "rollout/failed_samples": self._context.turn.failures.num_failed,
            "rollout/surplus_groups": len(self.surplus),
            "rollout/unfinished_groups": num_unfinished,
            **self._context.rewards.drain_metrics(),
        }
        return {**metrics, **{name: count for name, count in counts.items() if count}}


def scalar_rewards(args: Any, group: RolloutGroup) -> list[float]:
    """Scalar rewards of a group for the progress display; failed samples and odd rewards left out."""
    rewards = [s.get_reward_value(args) for s in iter_samples(group) if s.status is not Status.FAILED]
    return [float(r) for r in rewards if isinstance(r, int | float)]
