"""Refused updates are explained, and end the run when nothing else comes any more."""

from __future__ import annotations

import logging
import math

import pytest

from slime.backends.megatron.skip_guard import Skip, SkipGuard, gradient_skip, loss_skip
from slime.errors import TrainerError

BAD = Skip(reason="the loss is not finite")


def test_limit_counts_only_updates_that_follow_each_other() -> None:
    guard = SkipGuard(3)
    for step, skip in enumerate([BAD, BAD, None, BAD, BAD]):
        guard.note(skip, rollout_id=0, step_id=step)
    with pytest.raises(TrainerError, match="3 updates in a row were skipped, the last at rollout 7 step 1: the loss"):
        guard.note(BAD, rollout_id=7, step_id=1)


def test_zero_never_stops(caplog: pytest.LogCaptureFixture) -> None:
    guard = SkipGuard(0)
    with caplog.at_level(logging.WARNING):
        for step in range(50):
            guard.note(BAD, rollout_id=2, step_id=step)
    assert caplog.text.count("update skipped") == 50


def test_the_search_for_a_loss_scale_does_not_count() -> None:
    guard = SkipGuard(2)
    searching = gradient_skip(math.inf, [], scale_may_fall=True)
    for step in range(20):
        guard.note(searching, rollout_id=0, step_id=step)
    guard.note(BAD, rollout_id=0, step_id=20)
    with pytest.raises(TrainerError, match="2 updates in a row"):
        guard.note(BAD, rollout_id=0, step_id=21)


def test_reasons_name_what_was_not_finite() -> None:
    assert loss_skip({"loss": 1.0, "kl_loss": math.nan}) is None
    assert loss_skip({}) is None
    skip = loss_skip({"loss": math.nan, "kl_loss": math.inf, "pg_loss": 0.5})
    assert skip is not None
    assert skip.reason == "the loss is not finite (kl_loss = inf, loss = nan)"
    names = [f"layer.{i}" for i in range(5)]
    reason = gradient_skip(math.nan, names, scale_may_fall=False).reason
    assert reason == "the loss is finite and the gradient norm is nan (first in layer.0, layer.1, layer.2 and 2 more)"
