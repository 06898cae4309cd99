"""A training worker without a model: enough behaviour to see how the group treats it."""

import os
import signal
import time
from pathlib import Path


class StandInWorker:
    def __init__(self, config, rank, world_size, master_addr, master_port):
        self.rank, self.world_size, self.master = rank, world_size, (master_addr, master_port)
        self.weight_version = 0
        self.step_metrics = []

    def init(self):
        return 3

    def train(self, batch):
        behaviour = batch.get(self.rank, "train")
        if behaviour == "raise":
            raise ValueError("loss is not finite")
        if behaviour == "die":
            os.write(2, b"about to run out of memory\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if behaviour == "lose a peer":
            time.sleep(0.5)
            raise RuntimeError("Connection closed by peer")
        if behaviour == "hang":
            time.sleep(60)
        return {"train/loss": 0.5} if self.rank == 0 else {}

    def threads(self):
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ.get("FROM_FLAG"), str(Path.cwd())

    def update_weights(self):
        self.weight_version += 1
        return {"perf/update_weights_wire_bytes": 1.0}

    def close(self):
        pass
