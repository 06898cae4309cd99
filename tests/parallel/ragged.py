"""A rollout with everything that makes batches irregular in practice."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from slime.types import RolloutBatch
from tests.support.rollouts import make_rollout

NUM_ROLLOUTS = 10


def ragged_rollout(*, seed: int = 0, rollout_id: int = 0) -> RolloutBatch:
    """Groups of 4, 2 and 4 rollouts; a whole group between them was filtered away.

    The first rollout fans out into two samples. One sample is masked altogether, one response has a single
    token, the masks of others have gaps, one group has identical rewards, and its advantages are zero.
    """
    batch = make_rollout(num_groups=4, seed=seed, rollout_id=rollout_id)
    per_group: dict[int, int] = {}
    kept = []
    for i, group in enumerate(batch.group_ids):
        per_group[group] = per_group.get(group, 0) + 1
        if group != 1 and not (group == 2 and per_group[group] > 2):
            kept.append(i)
    columns = {f.name: getattr(batch, f.name) for f in fields(batch)}
    batch = RolloutBatch(**{k: [v[i] for i in kept] if isinstance(v, list) else v for k, v in columns.items()})
    masks = [mask.copy() for mask in batch.loss_masks]
    masks[3][:] = 0
    tokens, lengths, engine = list(batch.tokens), list(batch.response_lengths), list(batch.rollout_log_probs or [])
    tokens[6], lengths[6] = tokens[6][: len(tokens[6]) - lengths[6] + 1], 1
    masks[6], engine[6] = np.ones(1, dtype=np.float32), engine[6][:1]
    sums = dict.fromkeys(batch.rollout_ids, 0.0)
    for rollout, mask in zip(batch.rollout_ids, masks, strict=True):
        sums[rollout] += float(mask.sum())
    last = max(batch.group_ids)
    assert len(sums) == NUM_ROLLOUTS
    return replace(
        batch,
        tokens=tokens,
        response_lengths=lengths,
        rollout_log_probs=engine,
        loss_masks=masks,
        rollout_mask_sums=[sums[r] for r in batch.rollout_ids],
        rewards=[0.0 if g == last else r for g, r in zip(batch.group_ids, batch.rewards, strict=True)],
        raw_rewards=[1.0 if g == last else r for g, r in zip(batch.group_ids, batch.raw_rewards, strict=True)],
    )
