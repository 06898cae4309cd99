import importlib.util
import json
import logging

import pytest

from slime.errors import ConfigError
from slime.observability.tracking import (
    Outbox,
    TensorBoardTracker,
    TrackingOptions,
    WandbOptions,
    init_tracking,
    log,
    read_metrics,
)


def test_jsonl_rows_read_back_with_their_axis(tmp_path):
    tracking = init_tracking(TrackingOptions(run_dir=tmp_path))
    tracking.log({"train/step": 3, "train/loss": 0.5}, "train/step")
    tracking.log({"eval/step": 2, "eval/aime": 0.25}, "eval/step")
    rows = read_metrics(tmp_path / "metrics.jsonl")  # before closing: a killed run keeps its numbers
    assert [{k: v for k, v in row.items() if k != "time"} for row in rows] == [
        {"train/step": 3, "train/loss": 0.5},
        {"eval/step": 2, "eval/aime": 0.25},
    ]
    tracking.close()
    tracking.close()


def test_non_finite_numbers_are_written_and_warned_about(tmp_path, caplog):
    tracking = init_tracking(TrackingOptions(run_dir=tmp_path))
    with caplog.at_level(logging.WARNING):
        tracking.log({"train/step": 0, "train/loss": float("nan")}, "train/step")
    tracking.close()
    assert "train/loss" in caplog.text
    assert "NaN" in (tmp_path / "metrics.jsonl").read_text()


def test_resumed_run_appends(tmp_path):
    for step in range(2):
        tracking = init_tracking(TrackingOptions(run_dir=tmp_path))
        tracking.log({"rollout/step": step}, "rollout/step")
        tracking.close()
    assert [row["rollout/step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.slow
def test_tensorboard_scalars_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    tracker.log({"train/loss": 0.5}, "train/step", 7)
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalar = events.Scalars("train/loss")[0]
    assert (scalar.step, scalar.value) == (7, 0.5)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_asked_for_but_missing_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="--use-wandb"):
        init_tracking(TrackingOptions(run_dir=tmp_path, wandb=WandbOptions()))


def test_plugins_log_through_an_outbox():
    class Args:
        metric_sink = Outbox()

    log(Args(), {"rollout/step": 1, "rollout/mine": 2.0}, "rollout/step")
    assert Args.metric_sink.take() == [({"rollout/step": 1, "rollout/mine": 2.0}, "rollout/step")]
    assert Args.metric_sink.take() == []
    assert json.dumps({"rollout/mine": 2.0})
