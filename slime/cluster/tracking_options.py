"""From the logging section to the run's directory and its trackers."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path

from slime.config import Config, LoggingConfig
from slime.errors import ConfigError
from slime.observability.tracking import TrackingOptions, WandbOptions


def tracking_options(config: Config, run_dir: Path) -> TrackingOptions:
    """Which trackers run, and where they write.

    Raises:
        ConfigError: A tracker is asked for whose package is missing.
    """
    logging = config.logging
    wandb = WandbOptions(
        mode=logging.wandb_mode,
        directory=logging.wandb_dir,
        key=logging.wandb_key,
        host=logging.wandb_host,
        team=logging.wandb_team,
        group=logging.wandb_group,
        project=logging.wandb_project,
        run_id=logging.wandb_run_id,
        random_suffix=logging.wandb_random_suffix,
    )
    return TrackingOptions(
        run_dir=run_dir,
        tensorboard_dir=_tensorboard_directory(logging, run_dir),
        wandb=wandb if logging.use_wandb else None,
        config=json.loads(config.to_json()),
    )


def _tensorboard_directory(logging: LoggingConfig, run_dir: Path) -> Path | None:
    """``TENSORBOARD_DIR``, else below the run's directory; None when switched off or not installed."""
    installed = importlib.util.find_spec("tensorboard") is not None
    if logging.use_tensorboard is False or (logging.use_tensorboard is None and not installed):
        return None
    if not installed:
        raise ConfigError("--use-tensorboard needs the package tensorboard, which is not installed")
    if "TENSORBOARD_DIR" in os.environ:
        return Path(os.environ["TENSORBOARD_DIR"])
    base = run_dir / "tensorboard"
    if logging.tb_project_name is None:
        return base
    return base / logging.tb_project_name / (logging.tb_experiment_name or time.strftime("%Y%m%d_%H%M%S"))
