"""Watches the distance of trainer and engine from rollout to rollout: ``--max-logprob-diff``.

Owns the history, the bound and what happens above it. Causes are ``logprob_diagnosis``'s. Tests hold: a rollout
within the bound costs nothing; ``stop`` raises after the rollout is on record.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from slime.errors import TrainerError
from slime.observability.logprob_diagnosis import (
    LogprobEvidence,
    LogprobFacts,
    describe,
    diagnose,
    pattern_of,
)

logger = logging.getLogger(__name__)

DIFF_KEY = "train/train_rollout_logprob_abs_diff"
PATTERN_PREFIX = "rollout/logprob_diff/"
STALE_KEY = "rollout/weight_version/stale_share"
PROMPT_KEY = "rollout/prompt_mismatch"

_HISTORY = 10


def exceeds(difference: float, bound: float | None) -> bool:
    """Whether a mean difference is above the bound; one that is not a number is."""
    return bound is not None and not difference <= bound


class LogprobMonitor:
    """Compares each rollout's mean difference with a bound.

    Args:
        bound: ``--max-logprob-diff``; None only keeps the history.
        stop: Whether to end the run instead of warning.
        facts: What the run knows about both sides; asked when the bound is exceeded for the first time.
    """

    def __init__(self, bound: float | None, *, stop: bool, facts: Callable[[], LogprobFacts]) -> None:
        self._bound = bound
        self._stop = stop
        self._ask = facts
        self._facts: LogprobFacts | None = None
        self._history: deque[float] = deque(maxlen=_HISTORY)

    def check(self, step: int, metrics: Mapping[str, float], *, generated_ahead: bool = False) -> None:
        """Take in one finished rollout.

        Args:
            step: Which one.
            metrics: All its metrics; the difference is missing when nothing was generated or trained.
            generated_ahead: Whether rollouts may be older than the weights that are trained.

        Raises:
            TrainerError: The difference is above the bound and the run shall stop.
        """
        difference = metrics.get(DIFF_KEY)
        if difference is None:
            return
        self._history.append(difference)
        if self._bound is None or not exceeds(difference, self._bound):
            return
        if self._facts is None:
            self._facts = self._ask()
        causes = diagnose(
            replace(self._facts, generated_ahead=generated_ahead),
            LogprobEvidence(
                pattern=pattern_of(metrics, PATTERN_PREFIX),
                stale_share=metrics.get(STALE_KEY, 0.0),
                prompt_mismatch=metrics.get(PROMPT_KEY, 0.0),
                history=tuple(self._history),
            ),
        )
        message = (
            f"rollout {step}: trainer and engine log-probs differ by {difference:.3g} on average, above "
            f"--max-logprob-diff {self._bound:g}. The engine does not compute what the trainer trains. "
            f"Possible causes, the most likely first:\n{describe(causes)}"
        )
        if self._stop:
            raise TrainerError(message)
        logger.warning("%s", message)
