"""Train with reinforcement learning: generate, train, synchronise weights, repeat.

``python train.py --help`` lists the flags; ``train_async.py`` generates ahead of training instead.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slime.cluster.entry import exit_code

if TYPE_CHECKING:
    from slime.config import Config


def train(config: Config) -> None:
    """Run the synchronous loop from where the loaded checkpoint stopped."""
    from slime.cluster.launch import launch

    with launch(config) as run:  # ends everything it started, in reverse order
        run.sync_weights()
        run.evaluate_before_training()
        for step in run.steps():
            with run.generating():  # colocated: engines hold the devices
                rollout = run.rollout.generate(step)
            with run.training():  # colocated: the trainer holds them
                run.trainer.train(step, rollout)
            if run.save_due(step):
                run.save(step)
            run.sync_weights()
            if run.eval_due(step):
                run.evaluate(step)


def main() -> None:
    """Train what the command line asks for."""
    from slime.cli import parse_args

    train(parse_args(loop="in turn"))


if __name__ == "__main__":
    sys.exit(exit_code(main))
