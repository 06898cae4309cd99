"""What the operator reads: one line per rollout, a progress bar, a picture and a summary.

Owns the wording and the collection of a step's numbers, which arrive from rollout, trainer and
weight sync at different moments and leave as one record. Tests hold: a step is logged once, the
line shows the numbers it was given, and the summary names only paths that exist.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from slime.observability.logprob_monitor import DIFF_KEY, LogprobMonitor
from slime.observability.tracking import Tracking

logger = logging.getLogger(__name__)

# Label, metric keys (the first present one is shown), format.
_COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("rollout/raw_reward",), ".3f"),
    ("length", ("rollout/response_len/mean", "rollout/response_lengths"), ".1f"),
    ("truncated", ("rollout/truncated_ratio", "rollout/truncated"), ".0%"),
    ("logprob diff", (DIFF_KEY,), ".1e"),
    ("p99", (f"{DIFF_KEY}_p99",), ".1e"),
    ("loss", ("train/loss",), ".4f"),
    ("perplexity", ("train/perplexity",), ".3f"),
    ("value loss", ("critic-train/value_loss",), ".4f"),
    ("grad norm", ("train/grad_norm",), ".3f"),
    ("clipped", ("train/pg_clipfrac",), ".1%"),
    ("entropy", ("train/entropy",), ".2f"),
    ("rollout", ("perf/rollout_time",), ".2fs"),
    ("train", ("perf/train_time",), ".2fs"),
    ("sync", ("perf/sync_time",), ".2fs"),
    ("samples/s", ("perf/samples_per_sec",), ".2f"),
)


class Reporter:
    """Collects the numbers of each step and reports a step once, when it is complete."""

    def __init__(
        self,
        tracking: Tracking,
        *,
        num_rollout: int,
        first_step: int = 0,
        train_steps_per_rollout: int | None = None,
        logprob_monitor: LogprobMonitor | None = None,
        progress: bool | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Prepare for steps ``first_step`` … ``num_rollout`` - 1.

        Args:
            tracking: Destination of the metrics.
            num_rollout: Exclusive end of the steps.
            first_step: Where this run starts.
            train_steps_per_rollout: Put rollout and evaluation metrics at the number of optimizer
                steps instead of the number of rollouts.
            logprob_monitor: Watches the trainer/engine log-prob difference; None watches nothing.
            progress: Draw a bar; None draws it on a terminal only.
            stream: Where the bar is drawn; standard error when None.
        """
        self.tracking = tracking
        self.num_rollout = num_rollout
        self._axis_scale = train_steps_per_rollout or 1
        self.rewards: list[tuple[int, float]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.generated_ahead = False  # rollouts may be older than the weights that are trained
        self._logprob_monitor = logprob_monitor
        self._steps: dict[int, dict[str, float]] = {}
        self._optimizer_steps: dict[int, list[dict[str, float]]] = {}
        bar_stream: TextIO = stream or sys.stderr
        self._bar: Any = None
        if progress if progress is not None else bar_stream.isatty():
            tqdm: Any = importlib.import_module("tqdm")
            self._bar = tqdm.tqdm(
                total=num_rollout, initial=first_step, unit="rollout", file=bar_stream, dynamic_ncols=True, leave=True
            )

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add numbers to the record of ``step``."""
        self._steps.setdefault(step, {}).update(metrics)

    def add_optimizer_steps(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Give the metrics of single optimizer steps; with more than one they are logged instead of their sum.

        Args:
            step: The rollout they belong to.
            rows: ``train/*`` of each, with ``train/step``.
        """
        self._optimizer_steps[step] = [dict(row) for row in rows]

    def pending(self, step: int) -> dict[str, float]:
        """The numbers of ``step`` so far; empty once it is finished."""
        return dict(self._steps.get(step, {}))

    def finish(self, step: int) -> dict[str, float]:
        """Log the record of ``step`` and write its line; a step without numbers is ignored.

        Raises:
            TrainerError: The log-prob difference is above the bound and the run shall stop.
        """
        metrics = self._steps.pop(step, {})
        if not metrics:
            return {}
        train = {key: value for key, value in metrics.items() if key.startswith(("train/", "critic-"))}
        rest = {key: value for key, value in metrics.items() if key not in train}
        if rest:
            self.tracking.log(
                {**rest, "rollout/step": rest.get("rollout/step", step * self._axis_scale)}, "rollout/step"
            )
        rows = self._optimizer_steps.pop(step, [])
        for row in rows if len(rows) > 1 else [train] if train else []:
            self.tracking.log({**row, "train/step": row.get("train/step", step)}, "train/step")
        if "rollout/raw_reward" in metrics:
            self.rewards.append((step, metrics["rollout/raw_reward"]))
        if self._bar is not None:
            self._bar.clear()
        logger.info("%s", format_step(step, self.num_rollout, metrics))
        if self._bar is not None:
            self._bar.update(1)
        if self._logprob_monitor is not None:
            self._logprob_monitor.check(step, metrics, generated_ahead=self.generated_ahead)
        return metrics

    def evaluation(self, step: int, metrics: Mapping[str, float], *, before_training: bool = False) -> None:
        """Log held-out scores.

        Args:
            step: Rollout step for the axis.
            metrics: ``eval/*`` keys.
            before_training: Whether no step of this run was trained yet.
        """
        self.tracking.log({**metrics, "eval/step": metrics.get("eval/step", step * self._axis_scale)}, "eval/step")
        scores = {k.removeprefix("eval/"): v for k, v in metrics.items() if k.count("/") == 1 and "-" not in k}
        scores.pop("step", None)
        self.evaluations.append((0 if before_training else step + 1, scores))
        when = "before training" if before_training else f"after rollout {step}"
        logger.info("eval %s: %s", when, ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))

    def draw_rewards(self, path: Path) -> Path | None:
        """Save the reward curve as a PNG; None when there is nothing to draw."""
        if not self.rewards:
            return None
        matplotlib: Any = importlib.import_module("matplotlib.figure")
        figure: Any = matplotlib.Figure(figsize=(7, 4), layout="constrained")
        axes: Any = figure.subplots()
        axes.plot([s + 1 for s, _ in self.rewards], [r for _, r in self.rewards], label="training reward", alpha=0.7)
        for name in sorted({name for _, scores in self.evaluations for name in scores}):
            points = [(step, scores[name]) for step, scores in self.evaluations if name in scores]
            axes.plot([s for s, _ in points], [v for _, v in points], marker="o", label=f"held out: {name}")
        axes.set(xlabel="rollouts trained", ylabel="mean reward", title="Reward")
        axes.grid(alpha=0.3)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        return path

    def summary(self, paths: Mapping[str, Path | None]) -> str:
        """A table of first and last scores, and of the given paths that exist."""
        rows: list[tuple[str, str]] = []
        for name in sorted({name for _, scores in self.evaluations for name in scores}):
            values = [scores[name] for _, scores in self.evaluations if name in scores]
            before_after = f"{values[0]:.4f} -> {values[-1]:.4f}" if len(values) > 1 else f"{values[0]:.4f}"
            rows.append((f"held-out {name}", before_after))
        if self.rewards:
            rows.append(("training reward", f"{self.rewards[0][1]:.4f} -> {self.rewards[-1][1]:.4f}"))
        rows.extend((label, str(path)) for label, path in paths.items() if path is not None and path.exists())
        width = max((len(label) for label, _ in rows), default=0)
        return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)

    def close(self) -> None:
        """Close the bar and the trackers."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self.tracking.close()


# Label, metric key; what the line names only when it happened.
_INCIDENTS = (
    ("UPDATES SKIPPED (not finite)", "train/skipped_steps_count"),
    ("CRITIC UPDATES SKIPPED (not finite)", "critic-train/skipped_steps_count"),
    ("SAMPLES LEFT OUT (not finite)", "rollout/not_finite_samples_count"),
    ("ENGINES REPLACED", "rollout/engine_restarts"),
)


def format_step(step: int, num_rollout: int, metrics: Mapping[str, float]) -> str:
    """The line of one rollout: only columns whose numbers exist, and what went wrong."""
    cells: list[str] = []
    for label, keys, form in _COLUMNS:
        key = next((k for k in keys if k in metrics), None)
        if key is not None:
            seconds = form.endswith("s")
            cells.append(f"{label} {metrics[key]:{form.removesuffix('s')}}{'s' if seconds else ''}")
    cells += [f"{metrics[key]:.0f} {label}" for label, key in _INCIDENTS if metrics.get(key, 0.0) > 0]
    return f"rollout {step + 1}/{num_rollout} | " + " | ".join(cells)
