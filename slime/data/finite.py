"""Numbers that must not reach training: rewards and log-probs that are not finite.

Owns the search and its wording. A reward is the work of one function, so one bad value ends the run. A log-prob
comes from an engine that may have failed on a single sample, so such a sample is taken out of training, and the
run ends only when nothing is left. Entries that the loss mask hides may hold anything. Tests hold: the message
names sample, group and position; a sample that is taken out changes nothing else.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np

from slime.data.columns import rollout_mask_sums
from slime.errors import DataError
from slime.types import RolloutBatch

logger = logging.getLogger(__name__)

_NAMED = 5


def screen_batch(batch: RolloutBatch) -> tuple[RolloutBatch, int]:
    """Refuse rewards that are not finite and take samples with such log-probs out of training.

    Returns:
        The batch with the loss masks of those samples zeroed, and their number.

    Raises:
        DataError: A reward is not finite, or every trained sample has a log-prob that is not.
    """
    _check_rewards(batch)
    faults = _log_prob_faults(batch)
    if not faults:
        return batch, 0
    named = "; ".join(list(faults.values())[:_NAMED]) + (" ..." if len(faults) > _NAMED else "")
    what = f"rollout {batch.rollout_id}: {len(faults)} of {len(batch)} samples have log-probs that are not finite"
    cause = "the engine computes NaN or infinity, or a custom generate function recorded it"
    trained = sum(bool(mask.any()) for mask in batch.loss_masks)
    if len(faults) == trained:
        raise DataError(f"{what}, so nothing is left to train on: {named}. Probably {cause}")
    logger.warning("%s and are not trained on: %s. Probably %s", what, named, cause)
    masks = [np.zeros_like(m) if i in faults else m for i, m in enumerate(batch.loss_masks)]
    sums = rollout_mask_sums(masks, batch.rollout_ids)
    return replace(batch, loss_masks=masks, rollout_mask_sums=sums), len(faults)


def _check_rewards(batch: RolloutBatch) -> None:
    for name, values in (("reward", batch.rewards), ("raw reward", batch.raw_rewards)):
        bad = [i for i, value in enumerate(values) if not math.isfinite(value)]
        if not bad:
            continue
        named = ", ".join(f"{_sample(batch, i)}: {values[i]}" for i in bad[:_NAMED])
        raise DataError(
            f"rollout {batch.rollout_id}: {len(bad)} of {len(batch)} samples have a {name} that is not finite "
            f"({named}); the reward function, or --custom-reward-post-process-path, must return finite numbers"
        )


def _log_prob_faults(batch: RolloutBatch) -> dict[int, str]:
    """Sample position -> description of its first trained log-prob that is not finite."""
    faults: dict[int, str] = {}
    columns = {"rollout_log_probs": batch.rollout_log_probs, "teacher_log_probs": batch.teacher_log_probs}
    for name, rows in columns.items():
        for i, (row, mask) in enumerate(zip(rows or [], batch.loss_masks if rows else [], strict=True)):
            bad = np.flatnonzero((mask > 0) & ~np.isfinite(row))
            if len(bad):
                at = f"{name}[{bad[0]}] is {row[bad[0]]}"
                faults.setdefault(i, f"{_sample(batch, i)}: {at} ({len(bad)} of {len(row)} tokens)")
    return faults


def _sample(batch: RolloutBatch, i: int) -> str:
    return f"sample {batch.sample_indices[i]} of group {batch.group_ids[i]}"
