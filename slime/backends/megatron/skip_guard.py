"""Updates that were refused because a number was not finite: why, and how many in a row are too many.

Owns the wording of the reason and the count of consecutive refusals, which ends a run that learns nothing any
more. Every rank sees the same outcomes, so all of them stop at the same step. Tests hold: one applied update
starts the count anew; a loss scale that is still being searched does not count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from slime.errors import TrainerError

logger = logging.getLogger(__name__)

_NAMED_PARAMETERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Why an update was not applied.

    Args:
        reason: What was not finite.
        expected: Whether it belongs to the search for a loss scale in half precision.
    """

    reason: str
    expected: bool = False


def loss_skip(metrics: Mapping[str, float]) -> Skip | None:
    """The refusal that a step's metrics ask for: its loss is not finite.

    Args:
        metrics: Of the whole step, equal on every rank.
    """
    if math.isfinite(metrics.get("loss", 0.0)):
        return None
    parts = [f"{name} = {value}" for name, value in sorted(metrics.items()) if not math.isfinite(value)]
    return Skip(reason=f"the loss is not finite ({', '.join(parts)})")


def gradient_skip(norm: float, poisoned: list[str], *, scale_may_fall: bool) -> Skip:
    """The refusal of a gradient that is not finite.

    Args:
        norm: The gradient norm.
        poisoned: Parameters of this rank with such a gradient.
        scale_may_fall: Whether a smaller loss scale is tried next.
    """
    if scale_may_fall:
        return Skip(reason="the scaled gradients overflow; a smaller loss scale is tried", expected=True)
    where = ", ".join(poisoned[:_NAMED_PARAMETERS])
    more = f" and {len(poisoned) - _NAMED_PARAMETERS} more" if len(poisoned) > _NAMED_PARAMETERS else ""
    return Skip(
        reason=f"the loss is finite and the gradient norm is {norm}" + (f" (first in {where}{more})" if where else "")
    )


class SkipGuard:
    """Counts refused updates of one model and ends the run when too many follow each other.

    Args:
        limit: This many in a row end the run; 0 never does.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._consecutive = 0

    def note(self, skip: Skip | None, *, rollout_id: int, step_id: int) -> None:
        """Take in the outcome of one optimizer step.

        Args:
            skip: Why it was refused; None if the update was applied.
            rollout_id: Rollout being trained.
            step_id: Optimizer step within it.

        Raises:
            TrainerError: It is one refusal too many.
        """
        if skip is None:
            self._consecutive = 0
            return
        logger.warning("rollout %d step %d: update skipped: %s", rollout_id, step_id, skip.reason)
        if skip.expected:
            return
        self._consecutive += 1
        if self._limit and self._consecutive >= self._limit:
            raise TrainerError(
                f"{self._consecutive} updates in a row were skipped, the last at rollout {rollout_id} step {step_id}: "
                f"{skip.reason}. The weights are those before them. Check the rewards and log-probs of that rollout "
                "(--save-debug-rollout-data, --save-debug-train-data), --lr and --clip-grad, --precision, and the "
                "checkpoint that was loaded; --max-skipped-steps sets how many are tolerated, 0 all of them"
            )
