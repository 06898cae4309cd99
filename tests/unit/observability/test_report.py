import io
import logging

import pytest

from slime.errors import TrainerError
from slime.observability.logprob_diagnosis import LogprobFacts
from slime.observability.logprob_monitor import LogprobMonitor
from slime.observability.report import Reporter, format_step
from slime.observability.tracking import TrackingOptions, init_tracking, read_metrics


def make_reporter(tmp_path, **options):
    return Reporter(init_tracking(TrackingOptions(run_dir=tmp_path)), num_rollout=3, progress=False, **options)


def test_line_shows_only_numbers_it_was_given():
    line = format_step(4, 20, {"rollout/raw_reward": 0.5, "train/loss": -0.01234, "perf/train_time": 1.5})
    assert line == "rollout 5/20 | reward 0.500 | loss -0.0123 | train 1.50s"


def test_line_shows_the_monitors():
    metrics = {
        "train/train_rollout_logprob_abs_diff": 0.012,
        "train/train_rollout_logprob_abs_diff_p99": 0.05,
        "train/grad_norm": 1.0,
        "train/pg_clipfrac": 0.015,
        "train/entropy": 0.25,
    }
    assert format_step(0, 2, metrics) == (
        "rollout 1/2 | logprob diff 1.2e-02 | p99 5.0e-02 | grad norm 1.000 | clipped 1.5% | entropy 0.25"
    )


def test_line_names_what_went_wrong_only_when_it_did():
    fine = {"train/loss": 0.5, "train/skipped_steps_count": 0.0, "rollout/not_finite_samples_count": 0.0}
    assert format_step(0, 2, fine) == "rollout 1/2 | loss 0.5000"
    assert format_step(0, 2, fine | {"rollout/engine_restarts": 2.0}).endswith("| 2 ENGINES REPLACED")
    line = format_step(0, 2, fine | {"train/skipped_steps_count": 2.0, "rollout/not_finite_samples_count": 1.0})
    assert line.endswith("| 2 UPDATES SKIPPED (not finite) | 1 SAMPLES LEFT OUT (not finite)")


def test_a_step_is_logged_once_and_split_by_axis(tmp_path, caplog):
    reporter = make_reporter(tmp_path)
    reporter.add(1, {"rollout/raw_reward": 0.5, "perf/rollout_time": 2.0})
    reporter.add(1, {"train/loss": 0.1, "train/step": 7})
    with caplog.at_level(logging.INFO):
        reporter.finish(1)
        reporter.finish(1)
    reporter.close()
    assert caplog.text.count("rollout 2/3") == 1
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 2
    assert rows[0]["rollout/step"] == 1
    assert rows[0]["perf/rollout_time"] == 2.0
    assert rows[1]["train/step"] == 7
    assert "perf/rollout_time" not in rows[1]


def test_several_optimizer_steps_are_logged_one_by_one(tmp_path):
    reporter = make_reporter(tmp_path)
    reporter.add(1, {"train/loss": 0.5})
    reporter.add_optimizer_steps(1, [{"train/loss": 0.4, "train/step": 2}, {"train/loss": 0.6, "train/step": 3}])
    assert reporter.finish(1)["train/loss"] == 0.5
    reporter.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["train/step"], row["train/loss"]) for row in rows] == [(2, 0.4), (3, 0.6)]


def test_rollout_axis_can_count_optimizer_steps(tmp_path):
    reporter = make_reporter(tmp_path, train_steps_per_rollout=4)
    reporter.add(2, {"rollout/raw_reward": 0.5})
    reporter.finish(2)
    reporter.evaluation(2, {"eval/a": 1.0})
    reporter.close()
    rollout, evaluation = read_metrics(tmp_path / "metrics.jsonl")
    assert (rollout["rollout/step"], evaluation["eval/step"]) == (8, 8)


@pytest.mark.parametrize("stop", [True, False])
def test_logprob_difference_above_the_bound_warns_or_stops(tmp_path, caplog, stop):
    monitor = LogprobMonitor(0.01, stop=stop, facts=LogprobFacts)
    reporter = make_reporter(tmp_path, logprob_monitor=monitor)
    reporter.add(0, {"train/train_rollout_logprob_abs_diff": 0.009})
    reporter.finish(0)
    reporter.add(1, {"train/train_rollout_logprob_abs_diff": 0.02})
    if stop:
        with pytest.raises(TrainerError, match="--max-logprob-diff"):
            reporter.finish(1)
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2  # what stopped the run is on record
    else:
        reporter.finish(1)
        assert "--max-logprob-diff" in caplog.text
    reporter.close()


def test_logprob_difference_of_rollouts_generated_ahead_is_said_to_include_staleness(tmp_path, caplog):
    reporter = make_reporter(tmp_path, logprob_monitor=LogprobMonitor(0.01, stop=False, facts=LogprobFacts))
    stale = {"train/train_rollout_logprob_abs_diff": 0.02, "rollout/weight_version/stale_share": 1.0}
    for ahead in (False, True):
        caplog.clear()
        reporter.generated_ahead = ahead
        reporter.add(int(ahead), stale)
        reporter.finish(int(ahead))
        assert ("--async-buffer-size" in caplog.text) is ahead
    reporter.close()


def test_summary_shows_first_and_last_score_and_existing_paths(tmp_path):
    reporter = make_reporter(tmp_path)
    reporter.evaluation(0, {"eval/sums": 0.25, "eval/sums/response_len/mean": 3.0}, before_training=True)
    reporter.add(0, {"rollout/raw_reward": 0.3})
    reporter.finish(0)
    reporter.evaluation(0, {"eval/sums": 0.5, "eval/sums-truncated_ratio": 0.0})
    picture = reporter.draw_rewards(tmp_path / "reward.png")
    summary = reporter.summary({"reward curve": picture, "checkpoint": tmp_path / "missing"})
    reporter.close()
    assert "held-out sums" in summary
    assert "0.2500 -> 0.5000" in summary
    assert str(picture) in summary
    assert "checkpoint" not in summary
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_progress_bar_counts_finished_rollouts(tmp_path):
    stream = io.StringIO()
    tracking = init_tracking(TrackingOptions(run_dir=tmp_path))
    reporter = Reporter(tracking, num_rollout=2, progress=True, stream=stream)
    for step in range(2):
        reporter.add(step, {"rollout/raw_reward": 1.0})
        reporter.finish(step)
    reporter.close()
    assert "2/2" in stream.getvalue()
