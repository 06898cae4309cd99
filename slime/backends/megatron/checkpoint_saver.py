"""Saving during a run: at once, or with the files written while training goes on (``--async-save``).

Owns the one save that may be in progress. In the background a thread writes copies: forking, as Megatron
does, is unsafe beside gloo's and OpenMP's threads, and a child would outlive a killed rank. All
collectives stay in the caller's thread. Tests hold: whenever the process is killed, the tracker names a
complete checkpoint; training meanwhile does not change what is written; a failure of the thread is raised by
the next call on every rank.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import distributed as dist

from slime.backends.megatron.checkpoint import Trainable, begin_checkpoint
from slime.backends.megatron.checkpoint_files import PendingSave
from slime.backends.megatron.parallel import ParallelState
from slime.config import Config


class CheckpointSaver:
    """Writes checkpoints of one model below ``root``. Every method is collective over all ranks.

    ``last_complete`` is the rollout id of the newest checkpoint that it brought to an end.
    """

    def __init__(self, trainable: Trainable, config: Config, parallel: ParallelState, root: Path) -> None:
        self.last_complete: int | None = None
        self._trainable = trainable
        self._config = config
        self._parallel = parallel
        self._root = root
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None

    def save(self, rollout_id: int) -> None:
        """Save; with ``--async-save`` return as soon as the state is copied. Ends an earlier save first.

        Raises:
            CheckpointError: Writing failed, now or of the earlier save.
        """
        self.finish()
        pending = begin_checkpoint(self._trainable, self._config, self._parallel, self._root, rollout_id)
        if not self._config.checkpoint.async_save:
            pending.write()
            self._complete(pending)
            return
        pending.detach(self._trainable.storages())
        self._pending = pending
        # A daemon: a rank that ends in the middle leaves a directory that the next save clears away.
        self._thread = threading.Thread(target=pending.write, name=f"save of rollout {rollout_id}", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Complete a save whose files are written on all ranks; otherwise go on at once.

        Raises:
            CheckpointError: Writing failed on a rank.
        """
        if self._thread is None:
            return
        busy = torch.tensor([int(self._thread.is_alive())], device=self._parallel.device)
        if self._parallel.world_size > 1:
            dist.all_reduce(busy)
        if not busy.item():
            self.finish()

    def finish(self) -> None:
        """Wait for a save in progress and complete it.

        Raises:
            CheckpointError: Writing failed on a rank.
        """
        pending, thread = self._pending, self._thread
        self._pending = self._thread = None
        if pending is not None and thread is not None:
            thread.join()
            self._complete(pending)

    def _complete(self, pending: PendingSave) -> None:
        pending.complete()
        self.last_complete = pending.rollout_id
