"""What is written for people: output directory, trackers, extra metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig(Section):
    """Logging."""

    output_dir: str | None = flag(
        None,
        metavar="DIR",
        doc="Directory of everything a run writes. Default: outputs/ and the experiment's name or the start time.",
    )
    use_wandb: bool = flag(False, doc="Log to Weights & Biases.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None, doc="Default: the environment variable WANDB_MODE, then online."
    )
    wandb_dir: str | None = flag(None, doc="Directory of its local files.")
    wandb_key: str | None = flag(None, secret=True, doc="API key of Weights & Biases; written nowhere.")
    wandb_host: str | None = flag(None, doc="Server of Weights & Biases.")
    wandb_team: str | None = flag(None, doc="Entity (team) the run belongs to.")
    wandb_group: str | None = flag(None, doc="Group; also the name of the run.")
    wandb_project: str | None = flag(None, doc="Project the run belongs to.")
    wandb_run_id: str | None = flag(None, doc="Id of the run to continue.")
    wandb_random_suffix: bool = flag(
        True, off="--disable-wandb-random-suffix", doc="Do not add a random suffix to the group's name."
    )
    wandb_always_use_train_step: bool = flag(False, doc="Use the training step as x-axis of every metric.")
    use_tensorboard: bool | None = flag(
        None, doc="Write TensorBoard events below --output-dir. Default: on when tensorboard is installed."
    )
    tb_project_name: str | None = flag(
        None, doc="Project; with it events go to OUTPUT_DIR/tensorboard/PROJECT/EXPERIMENT."
    )
    tb_experiment_name: str | None = flag(None, doc="Name of the run. Default: the start time.")
    log_multi_turn: bool = flag(False, doc="Metrics of multi-turn samples.")
    log_passrate: bool = flag(False, doc="pass@k of training and evaluation.")
    log_reward_category: str | None = flag(None, doc="Entry of an object reward whose values are counted.")
    log_correct_samples: bool = flag(False, doc="Lengths and truncation of the samples with reward 1.")
