"""Rewards and log-probs that are not finite are named before training, and never trained on."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest

from slime.data.finite import screen_batch
from slime.errors import DataError
from slime.observability.metrics import compute_batch_metrics
from slime.types import RolloutBatch
from tests.support.rollouts import make_rollout

BATCH = make_rollout()


def with_log_prob(batch: RolloutBatch, sample: int, position: int, value: float, *, masked: bool) -> RolloutBatch:
    assert batch.rollout_log_probs is not None
    rows = [row.copy() for row in batch.rollout_log_probs]
    masks = [mask.copy() for mask in batch.loss_masks]
    rows[sample][position] = value
    masks[sample][position] = 0.0 if masked else 1.0
    return replace(batch, rollout_log_probs=rows, loss_masks=masks)


def test_a_clean_batch_is_passed_on_as_it_is() -> None:
    assert screen_batch(BATCH) == (BATCH, 0)
    assert screen_batch(replace(BATCH, rollout_log_probs=None))[1] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sample_with_a_bad_log_prob_is_named_and_taken_out(value: float, caplog: pytest.LogCaptureFixture) -> None:
    batch = replace(BATCH, sample_indices=[100 + i for i in range(len(BATCH))])
    sample = next(i for i, n in enumerate(batch.response_lengths) if n > 2)
    with caplog.at_level(logging.WARNING):
        screened, count = screen_batch(with_log_prob(batch, sample, 2, value, masked=False))
    assert count == 1
    assert f"sample {100 + sample} of group {batch.group_ids[sample]}: rollout_log_probs[2] is" in caplog.text
    for i, mask in enumerate(screened.loss_masks):
        assert np.array_equal(mask, np.zeros_like(mask) if i == sample else batch.loss_masks[i])
    for i, rollout in enumerate(batch.rollout_ids):
        members = [j for j, other in enumerate(batch.rollout_ids) if other == rollout and j != sample]
        assert screened.rollout_mask_sums[i] == sum(float(batch.loss_masks[j].sum()) for j in members)
    assert screened.rewards == batch.rewards  # it still counts in its group's baseline


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_the_mask_hides_may_be_anything(value: float) -> None:
    sample = next(i for i, n in enumerate(BATCH.response_lengths) if n > 2)
    poisoned = with_log_prob(BATCH, sample, 1, value, masked=True)
    assert screen_batch(poisoned)[1] == 0
    assert math.isfinite(compute_batch_metrics(poisoned)["rollout/rollout_log_probs"])


def test_teacher_log_probs_are_screened_too(caplog: pytest.LogCaptureFixture) -> None:
    rows = [np.zeros(n, dtype=np.float32) for n in BATCH.response_lengths]
    rows[3][0] = math.nan
    with caplog.at_level(logging.WARNING):
        assert screen_batch(replace(BATCH, teacher_log_probs=rows))[1] == 1
    assert "sample 3" in caplog.text
    assert "teacher_log_probs[0] is nan" in caplog.text


def test_a_rollout_without_one_good_sample_ends_the_run() -> None:
    rows = [np.full(n, math.nan, dtype=np.float32) for n in BATCH.response_lengths]
    with pytest.raises(DataError, match="nothing is left to train on: sample 0 of group 0"):
        screen_batch(replace(BATCH, rollout_log_probs=rows))


@pytest.mark.parametrize("column", ["rewards", "raw_rewards"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_bad_reward_ends_the_run_and_is_named(column: str, value: float) -> None:
    values = list(getattr(BATCH, column))
    values[5] = value
    with pytest.raises(DataError, match=f"sample 5 of group {BATCH.group_ids[5]}: {value}"):
        screen_batch(replace(BATCH, **{column: values}))
