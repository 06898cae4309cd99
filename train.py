"""Train with reinforcement learning: generate, train, synchronise weights, repeat.

``python train.py --help`` lists the flags; ``train_async.py`` generates ahead of training instead.
"""

import sys

from slime.cli import parse_args
from slime.cluster.entry import main
from slime.cluster.launch import launch
from slime.config import Config


def train(config: Config) -> None:
    """Run the synchronous loop from where the loaded checkpoint stopped."""
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


if __name__ == "__main__":
    sys.exit(main(train, parse_args))
