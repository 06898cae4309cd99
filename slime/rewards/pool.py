"""Grading in worker processes: bounded in time and memory, never in the way of the event loop.

Tests hold: a grader that hangs is killed after its time, and the next one is served.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from slime.errors import WaitTimeoutError
from slime.rewards.grade import RewardTimeoutError
from slime.worker_process import WorkerCallError, WorkerDiedError, WorkerPool

logger = logging.getLogger(__name__)

_MAX_DEFAULT_WORKERS = 8
_MEMORY_LIMIT_BYTES = 8 << 30


class RewardPool:
    """Runs graders in child processes, which are started when first needed and kept warm.

    Args:
        num_workers: Most processes; None takes half of the cores, at most 8.
        timeout_seconds: Most seconds per call, counted from when a process starts on it.
    """

    def __init__(self, *, num_workers: int | None, timeout_seconds: float) -> None:
        if num_workers is None:
            num_workers = max(1, min(_MAX_DEFAULT_WORKERS, (os.cpu_count() or 2) // 2))
        self._pool = WorkerPool("reward", num_workers, memory_limit_bytes=_MEMORY_LIMIT_BYTES)
        self._timeout_seconds = timeout_seconds
        self.num_failures = 0

    @property
    def pids(self) -> set[int]:
        """Process ids of the workers that exist now."""
        return self._pool.pids

    async def call(self, path: str, arguments: tuple[Any, ...], *, otherwise: Any) -> Any:
        """Run ``module:attribute`` in a worker.

        Args:
            path: The function.
            arguments: Picklable arguments.
            otherwise: The answer when it brings its process down; counted.

        Returns:
            Its result.

        Raises:
            RewardTimeoutError: It took too long; its process was killed.
            WorkerCallError: The function raised, which is a fault of ours or of the data.
        """
        future = self._pool.submit(path, arguments, timeout_seconds=self._timeout_seconds)
        try:
            return await asyncio.wrap_future(future)
        except WaitTimeoutError as error:
            raise RewardTimeoutError(str(error)) from error
        except (WorkerDiedError, WorkerCallError) as error:
            if isinstance(error, WorkerCallError) and "MemoryError" not in str(error):
                raise
            self.num_failures += 1
            logger.warning("reward 0: %s", error)
        return otherwise

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()
