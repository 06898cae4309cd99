"""Where metrics go: a JSON-lines file always, TensorBoard, Weights & Biases.

Owns the fan-out and the axes (``train/*`` by ``train/step``, ``eval/*`` by ``eval/step``, the rest
by ``rollout/step``). One process, the driver, writes; other processes hand their metrics over
through an ``Outbox``. Tests hold: what is logged can be read back from each destination, and a
non-finite number is written, not dropped.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from slime.errors import ConfigError

logger = logging.getLogger(__name__)

STEP_KEYS = ("train/step", "rollout/step", "eval/step")


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbOptions:
    """Settings of a Weights & Biases run; None leaves the choice to wandb and its environment."""

    mode: str | None = None
    directory: str | None = None
    key: str | None = None
    host: str | None = None
    team: str | None = None
    group: str | None = None
    project: str | None = None
    run_id: str | None = None
    random_suffix: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingOptions:
    """Which trackers run. ``tensorboard_dir`` or ``wandb`` None means: not that one."""

    run_dir: Path
    tensorboard_dir: Path | None = None
    wandb: WandbOptions | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Tracker(Protocol):
    """One destination of metrics."""

    def log(self, metrics: Mapping[str, float], step_key: str, step: int) -> None:
        """Write ``metrics`` (without the step entry) at ``step`` of the axis ``step_key``."""
        ...

    def close(self) -> None:
        """Flush and release; called once."""
        ...


class MetricSink(Protocol):
    """What accepts metrics: the tracking itself, or an outbox that is emptied by its owner."""

    def log(self, metrics: Mapping[str, float], step_key: str) -> None:
        """Record ``metrics``, which hold their step under ``step_key``."""
        ...


class JsonlTracker:
    """``metrics.jsonl``: one object per call, with ``time`` and the step under its key."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: TextIO = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step_key: str, step: int) -> None:
        """Append one line and flush, so that a killed run keeps its numbers."""
        row = {"time": time.time(), step_key: step, **metrics}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """Scalars for ``tensorboard --logdir``."""

    def __init__(self, directory: Path) -> None:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = tensorboard.SummaryWriter(log_dir=str(directory))

    def log(self, metrics: Mapping[str, float], step_key: str, step: int) -> None:
        """Add one scalar per key."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """One Weights & Biases run, with an axis per metric family."""

    def __init__(self, options: WandbOptions, config: Mapping[str, Any]) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "--use-wandb needs the package wandb, which is not installed; install it or drop the flag"
            ) from error
        if options.key and options.mode not in ("offline", "disabled"):
            wandb.login(key=options.key, host=options.host)
        suffix = f"_{uuid.uuid4().hex[:8]}" if options.random_suffix else ""
        group = f"{options.group}{suffix}" if options.group else None
        name = f"{group}-RANK_0" if group and options.random_suffix else group
        settings = {"mode": options.mode} if options.mode else {}
        self._run: Any = wandb.init(
            entity=options.team,
            project=options.project,
            group=group,
            name=name,
            id=options.run_id,
            resume="allow" if options.run_id else None,
            dir=options.directory,
            config=dict(config),
            **settings,
        )
        for step_key in STEP_KEYS:
            self._run.define_metric(step_key)
        self._run.define_metric("train/*", step_metric="train/step")
        self._run.define_metric("eval/*", step_metric="eval/step")
        for family in ("rollout", "multi_turn", "passrate", "perf"):
            self._run.define_metric(f"{family}/*", step_metric="rollout/step")

    def log(self, metrics: Mapping[str, float], step_key: str, step: int) -> None:
        """Send one row."""
        self._run.log({**metrics, step_key: step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Tracking:
    """All destinations of one run."""

    def __init__(self, trackers: Mapping[str, Tracker], options: TrackingOptions) -> None:
        self.options = options
        self._trackers = dict(trackers)

    def log(self, metrics: Mapping[str, float], step_key: str) -> None:
        """Send ``metrics`` to every destination.

        Args:
            metrics: Numbers by name, with the step under ``step_key``.
            step_key: One of ``STEP_KEYS``.
        """
        step = int(metrics[step_key])
        values = {key: float(value) for key, value in metrics.items() if key != step_key}
        odd = [key for key, value in values.items() if not math.isfinite(value)]
        if odd:
            logger.warning("%s %d: not finite: %s", step_key, step, ", ".join(odd))
        for tracker in self._trackers.values():
            tracker.log(values, step_key, step)

    def close(self) -> None:
        """Finish every destination; one that fails does not keep the others open."""
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close()
            except (OSError, RuntimeError) as error:
                logger.warning("closing the %s tracker failed: %s", name, error)


class Outbox:
    """Metrics recorded in a process that does not own the trackers, until their owner takes them."""

    def __init__(self) -> None:
        self._rows: list[tuple[dict[str, float], str]] = []

    def log(self, metrics: Mapping[str, float], step_key: str) -> None:
        """Keep a row for later."""
        self._rows.append((dict(metrics), step_key))

    def take(self) -> list[tuple[dict[str, float], str]]:
        """All rows so far, oldest first; they are forgotten here."""
        rows, self._rows = self._rows, []
        return rows


class SinkArgs(Protocol):
    """The run-time fact that plug-ins' ``log`` calls read from the flat arguments."""

    metric_sink: MetricSink


def init_tracking(options: TrackingOptions) -> Tracking:
    """Open the trackers that ``options`` ask for.

    Raises:
        ConfigError: Weights & Biases is asked for and not installed.
    """
    trackers: dict[str, Tracker] = {"jsonl": JsonlTracker(options.run_dir / "metrics.jsonl")}
    if options.tensorboard_dir is not None:
        trackers["tensorboard"] = TensorBoardTracker(options.tensorboard_dir)
    if options.wandb is not None:
        trackers["wandb"] = WandbTracker(options.wandb, options.config)
    return Tracking(trackers, options)


def log(args: SinkArgs, metrics: Mapping[str, float], step_key: str) -> None:
    """Log from a plug-in: ``metrics[step_key]`` is the step."""
    args.metric_sink.log(metrics, step_key)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl`` file, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
