"""Training workers that leave their device on a CPU too, and write down every turn."""

from pathlib import Path

from slime.backends.megatron.critic import CriticWorker
from slime.backends.megatron.worker import MegatronWorker

TURNS = "turns.log"


def note(output_dir, event):
    """Append one event; processes take turns, so that lines do not mix."""
    with (Path(output_dir) / TURNS).open("a") as file:
        file.write(event + "\n")


class _Recorded:
    role = "actor"

    def __init__(self, config, rank, world_size, master_addr, master_port):
        super().__init__(config, rank, world_size, master_addr, master_port, moves_memory=True)

    def _note(self, event):
        note(self.config.logging.output_dir, f"{self.role} {event}")

    def init(self):
        self._note("init")
        return super().init()

    def sleep(self):
        super().sleep()
        assert self._device_state.on_device == ()
        self._note("sleep")

    def hold_parameters(self):
        super().hold_parameters()
        self._note("hold parameters")

    def wake_up(self):
        super().wake_up()
        self._note("wake up")

    def train(self, *args):
        self._note("train")
        return super().train(*args)

    def update_weights(self):
        self._note("update weights")
        return super().update_weights()

    def save(self, rollout_id):
        self._note("save")
        return super().save(rollout_id)


class MovingActor(_Recorded, MegatronWorker):
    """The policy."""


class MovingCritic(_Recorded, CriticWorker):
    """The value model."""

    role = "critic"

    def score(self, batch):
        self._note("score")
        return super().score(batch)
