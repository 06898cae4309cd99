"""The files of one checkpoint: planned together, written by each rank, completed together.

Owns the three parts of a save, of which only the first and the last are collective, so that the one in
between can run beside training. What is in a checkpoint is ``checkpoint``'s; names and renames are
``checkpoint_dirs``'. Tests hold: a failure in one rank's files is raised on all ranks with its cause, and the
checkpoint never gets its name.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import distributed as dist
from torch.distributed.checkpoint import CheckpointException

from slime.backends.megatron.checkpoint_dirs import CONFIG_FILE, begin_save, finish_save
from slime.backends.megatron.parallel import ParallelState
from slime.config import Config
from slime.errors import CheckpointError

Bucket = tuple[Any, ...]
"""One file: path, key, and its (item, bytes) and (item, tensor) pairs."""


class PendingSave:
    """A planned checkpoint. Call ``write`` once on each rank, then ``complete`` on all."""

    def __init__(self, request: Any, config: Config, parallel: ParallelState, target: Path, rollout_id: int) -> None:
        self.rollout_id = rollout_id
        self._config = config
        self._parallel = parallel
        self._target = target
        self._finalize = list(request.finalize_fns)
        self._buckets: list[Bucket] = []
        self._planned: list[Any] = []  # Megatron's own list; it keeps what it planned alive to the end
        self._transforms: list[Any] = []
        self._results: Any = None
        self._error: str | None = None
        if request.async_fn is not None:
            self._buckets = request.preload_fn()  # on a device, this copies everything to the CPU
            self._planned = request.preload_fn.args[0]
            self._transforms = request.async_fn.args[0]
            self._results = request.async_fn_args[2]

    def detach(self, live: Set[int]) -> None:
        """Copy every tensor that lies in one of the storages ``live``, so that training may change those."""
        self._buckets = [
            (*place, (data, [(item, _copy_of(tensor, live)) for item, tensor in tensors]))
            for *place, (data, tensors) in self._buckets
        ]

    def write(self) -> None:
        """Write this rank's files. Not collective and free of exceptions: ``complete`` raises what went wrong."""
        try:
            if self._results is not None:
                self._results.put(self._write_buckets())
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._buckets = []
            self._planned[:] = [None] * len(self._planned)
            _return_freed_memory()

    def complete(self) -> None:
        """Give the checkpoint its name. Collective over all ranks.

        Raises:
            CheckpointError: A rank could not write, with its cause; the newest checkpoint is still the one before.
        """
        self._raise_failures()
        with checkpoint_faults(f"writing {self._target.parent}"):
            for finalize in self._finalize:
                finalize()
        _on_first_rank(self._name, self._parallel)

    def _name(self) -> None:
        (self._target / CONFIG_FILE).write_text(self._config.to_json())
        finish_save(self._target.parent, self.rollout_id, keep=self._config.checkpoint.keep_checkpoints)

    def _write_buckets(self) -> dict[int, Any]:
        written: dict[int, Any] = {}
        for index, bucket in enumerate(self._buckets):
            _, outcome = filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                self._transforms, index, bucket, None, None, use_fsync=True
            )
            if isinstance(outcome, Exception):
                raise RuntimeError(f"{bucket[0]}: {outcome}") from outcome
            written[index] = outcome
        return written

    def _raise_failures(self) -> None:
        errors: list[str | None] = [self._error]
        if self._parallel.world_size > 1:
            errors = [None] * self._parallel.world_size
            dist.all_gather_object(errors, self._error)
        failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        if failed:
            raise CheckpointError(
                f"the checkpoint of rollout {self.rollout_id} could not be written: {'; '.join(failed)}; check --save "
                "and the free space"
            )


def plan_save(
    state: Callable[[], dict[str, Any]],
    stored_metadata: dict[str, Any],
    config: Config,
    parallel: ParallelState,
    root: Path,
    rollout_id: int,
) -> PendingSave:
    """Agree on who writes what into a new directory. Collective over all ranks.

    Args:
        state: Makes the sharded state.
        stored_metadata: How it is sharded, for the reader.
        config: Dumped beside it.
        parallel: This rank's place.
        root: ``--save``.
        rollout_id: Names the checkpoint.

    Raises:
        CheckpointError: The directory cannot be made, or the state does not fit together.
    """
    with checkpoint_faults(f"writing {root}"), _queue_in_process():
        target = _on_first_rank(lambda: str(begin_save(root, rollout_id)), parallel)
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), parallel.dp_cp_group)
        request = dist_checkpointing.save(
            state(), target, strategy, content_metadata=stored_metadata, async_sharded_save=True, async_strategy="mcore"
        )
        return PendingSave(request, config, parallel, Path(target), rollout_id)


def _return_freed_memory() -> None:
    """Ask glibc to give freed memory back: it keeps blocks below 32 MB, which most parameters are."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _copy_of(tensor: torch.Tensor, live: Set[int]) -> torch.Tensor:
    return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor


def _on_first_rank(action: Any, parallel: ParallelState) -> Any:
    """Run on rank 0 and give every rank the result, or the failure."""
    outcome: list[Any] = [None]
    if parallel.rank == 0:
        try:
            outcome = [(True, action())]
        except OSError as error:
            outcome = [(False, str(error))]
    if parallel.world_size > 1:
        dist.broadcast_object_list(outcome, src=0)
    ok, value = outcome[0]
    if not ok:
        raise CheckpointError(f"a checkpoint could not be written: {value}; check --save and the free space")
    return value


@contextmanager
def _queue_in_process() -> Any:
    """Collect the writers' results without a helper process.

    megatron starts a multiprocessing Manager for them, which outlives a killed rank. Here files are
    written from threads of this process, for which a plain queue is enough.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    # It also warns that the caller of its asynchronous save is deprecated; only its plan is used here.
    torch_strategy._logged_mcore_async_deprecation = True
    try:
        yield
    finally:
        filesystem_async._results_queue = before


@contextmanager
def checkpoint_faults(doing: str) -> Any:
    """Name the checkpoint in whatever goes wrong; torch's ``CheckpointException`` is no ``Exception``."""
    try:
        yield
    except CheckpointError:
        raise
    except (CheckpointException, OSError, KeyError, RuntimeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{doing} failed: {error}") from error
    except dist_checkpointing.core.CheckpointingException as error:
        raise CheckpointError(f"{doing} failed: {error}") from error
