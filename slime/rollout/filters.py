"""Dynamic sampling filters: which groups are worth training on.

Owns the verdict type, the call of a filter, the built-in filters and the count of dropped groups.
Tests hold that fan-out groups and failed samples are handled, and the drop rule for groups that
are kept only for want of others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.errors import PluginError
from slime.rollout.types import RolloutGroup, iter_samples
from slime.types import Sample, Status

MIN_REWARD_STD = 1e-6


@dataclass
class DynamicFilterOutput:
    """Verdict on one group.

    Args:
        keep: Whether to train on the group.
        reason: Why not; becomes the metric ``rollout/dynamic_filter/drop_{reason}``.
        keep_when_insufficient: Keep it nevertheless when the groups in flight and kept do not
            exceed the target, so that no new over-sampling round is started for it.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter; without one every group is kept, and a bare bool is a verdict without a reason.

    Raises:
        PluginError: The filter returned something else.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    if isinstance(output, int) or type(output).__name__ == "bool_":  # bool, and numpy's own bool
        return DynamicFilterOutput(keep=bool(output))
    raise PluginError(
        f"--dynamic-sampling-filter-path: {getattr(fn, '__qualname__', fn)} returned {type(output).__name__}; "
        "expected DynamicFilterOutput or bool"
    )


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_batch_size: int
) -> bool:
    """Whether a group goes, given the groups in flight plus kept and how many are wanted."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_batch_size)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one dropped group."""
        self._drops[reason or "unspecified"] += 1

    @property
    def num_dropped(self) -> int:
        """Groups dropped so far, over all reasons."""
        return sum(self._drops.values())

    def collect(self) -> dict[str, int]:
        """``rollout/dynamic_filter/drop_{reason}`` to number of groups."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}


def check_reward_nonzero_std(args: Any, samples: RolloutGroup | list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ: equal rewards give zero advantages.

    Failed samples carry no judgement of the model and are left out.

    Args:
        args: Flat argument view (``reward_key``).
        samples: One group; fan-out lists are flattened.
        **kwargs: Ignored.
    """
    rewards = [float(s.get_reward_value(args)) for s in iter_samples(samples) if s.status is not Status.FAILED]
    std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    if std > MIN_REWARD_STD:
        return DynamicFilterOutput(keep=True)
    reason = f"zero_std_{round(rewards[0], 1)}" if rewards else "all_failed"
    return DynamicFilterOutput(keep=False, reason=reason)


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: RolloutGroup | list[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Like ``check_reward_nonzero_std``, but rather train on such a group than sample another round."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = not output.keep
    return output
