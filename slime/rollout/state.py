"""``GenerateState(args)``: what plug-ins know as the shared state of generation.

A view, not an owner: everything lives in the ``RolloutContext`` that ``args`` belongs to, so two
views of the same ``args`` see the same things. Tests hold that changes made through one view are
seen through another and by the pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any

from slime.rollout.context import GroupTask, RolloutContext
from slime.rollout.generate import generate_and_rm_group
from slime.rollout.loop import ConcurrencyLimit
from slime.types import Sample


class GenerateState:
    """View on the handle of the running rollout.

    Args:
        args: The flat arguments that a rollout function received.

    Raises:
        RuntimeError: ``args`` belongs to no rollout.
    """

    __slots__ = ("_context",)

    def __init__(self, args: Any) -> None:
        self._context = RolloutContext.of(args)

    @property
    def args(self) -> Any:
        """Flat arguments."""
        return self._context.args

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of ``--hf-checkpoint``."""
        return self._context.tokenizer

    @property
    def processor(self) -> Any:
        """Multimodal processor; None for a text model."""
        return self._context.processor

    @property
    def semaphore(self) -> ConcurrencyLimit:
        """Samples that may generate at once; use with ``async with``."""
        return self._context.limit

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Sampling parameters of training; copy before changing them."""
        return self._context.sampling_params

    @property
    def group_sampling_seeds(self) -> list[int] | None:
        """Seed per position in a group; None without deterministic inference."""
        if not self.args.sglang_enable_deterministic_inference:
            return None
        return [self.args.rollout_seed + i for i in range(self.args.n_samples_per_prompt)]

    @property
    def dp_counts(self) -> list[int]:
        """Samples in flight per data-parallel rank of the engine."""
        return self._context.dp_counts

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Take the least loaded data-parallel rank, ties broken at random."""
        counts = self._context.dp_counts
        rank = random.choice([i for i, n in enumerate(counts) if n == min(counts)])
        counts[rank] += 1
        try:
            yield rank
        finally:
            counts[rank] -= 1

    @property
    def remaining_batch_size(self) -> int:
        """Groups in flight plus groups kept."""
        return self._context.turn.remaining_batch_size

    @remaining_batch_size.setter
    def remaining_batch_size(self, value: int) -> None:
        self._context.turn.remaining_batch_size = value

    @property
    def pendings(self) -> set[GroupTask]:
        """Tasks of the groups in flight."""
        return self._context.turn.pendings

    @pendings.setter
    def pendings(self, value: set[GroupTask]) -> None:
        self._context.turn.pendings = value

    @property
    def aborted(self) -> bool:
        """Whether the rollout has all it needs."""
        return self._context.turn.aborted

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._context.turn.aborted = value

    def reset(self) -> None:
        """Forget the groups in flight and the abort."""
        turn = self._context.turn
        turn.remaining_batch_size, turn.aborted = 0, False
        turn.pendings, turn.inputs = set(), {}

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Start generating groups; call it on the loop that will await them."""
        turn, context = self._context.turn, self._context
        for group in samples:
            job = generate_and_rm_group(context.args, group, context.sampling_params.copy(), evaluation=False)
            task = asyncio.get_running_loop().create_task(job)
            turn.pendings.add(task)
            turn.inputs[task] = group
        turn.remaining_batch_size += len(samples)
