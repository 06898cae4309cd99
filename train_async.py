"""Train with rollouts generated ahead of training; see ``--async-buffer-size``.

Before a sync the rollout in progress is finished, unless ``--update-weights-during-rollout`` lets weights change in it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slime.cluster.entry import exit_code

if TYPE_CHECKING:
    from slime.config import Config


def train(config: Config) -> None:
    """Run the asynchronous loop from where the loaded checkpoint stopped."""
    from slime.cluster.launch import launch

    with launch(config) as run:  # ends everything it started, in reverse order
        run.sync_weights()
        run.evaluate_before_training()
        with run.rollouts_ahead() as rollouts:
            for step in run.steps():
                rollout = rollouts.take(step)
                with run.training():  # brings back a trainer that --offload-train took away
                    run.trainer.train(step, rollout)
                if run.save_due(step):
                    run.save(step)
                if run.sync_due(step):
                    with rollouts.ready_for_sync():
                        run.sync_weights()
                if run.eval_due(step):
                    run.evaluate(step)


def main() -> None:
    """Train what the command line asks for."""
    from slime.cli import parse_args

    train(parse_args(loop="ahead"))


if __name__ == "__main__":
    sys.exit(exit_code(main))
