"""Training through ``MegatronWorker`` under a layout, and what of it is compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from slime.types import RolloutBatch
from tests.parallel import recorder
from tests.parallel.layouts import layout
from tests.parallel.ragged import NUM_ROLLOUTS, ragged_rollout
from tests.support.gloo import Rank, run_ranks
from tests.support.training import make_config, make_critic_config
from tests.support.workers import running_worker, weights_of

LIMIT = 1e-6

# The first step of Adam with lr 1 and eps 1 is g / (|g| + 1): weights then show differences of gradients linearly.
OPTIMIZER = (
    "--lr",
    "1",
    "--adam-eps",
    "1",
    "--weight-decay",
    "0",
    "--clip-grad",
    "1e9",
    "--lr-decay-style",
    "constant",
)

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60, "global_batch_size": NUM_ROLLOUTS}

Columns = dict[tuple[int, int, str], Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One configuration and its rollouts, without the layout.

    Args:
        model: Directory of the model.
        sections: Fields of ``Config`` by section.
        argv: Megatron's flags besides those of the layout.
        batches: What is trained.
        critic: Train a value model instead of the policy.
    """

    model: Path
    sections: dict[str, dict[str, Any]]
    argv: tuple[str, ...] = ()
    batches: Sequence[RolloutBatch] = field(default_factory=lambda: [ragged_rollout()])
    critic: bool = False


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What training gave: by optimizer step, then weights of the end, then columns of all samples by rank.

    ``weights`` is empty but on rank 0.
    """

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    columns: Columns


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest differences of two traces. Gradient norms: relative. Columns: relative above 1, None without any.

    The limit holds for one optimizer step; the second starts from weights that differ already.
    """

    loss: float
    grad_norm: float
    weights: float
    log_probs: float | None

    limit: float = LIMIT

    @property
    def passes(self) -> bool:
        """Whether all are within the limit."""
        return all(d <= self.limit for d in (self.loss, self.grad_norm, self.weights, self.log_probs or 0.0))


def trace(rank: Rank, training: Training, layout_name: str) -> Trace:
    """Train under a layout. Collective."""
    sections = {name: dict(values) for name, values in training.sections.items()}
    sections["rollout"] = {"rollout_data_postprocess_path": recorder.PATH} | sections.get("rollout", {})
    argv = (*OPTIMIZER, *training.argv, *layout(layout_name).argv)
    make = make_critic_config if training.critic else make_config
    prefix, train_one = ("critic-train", train_critic) if training.critic else ("train", train_policy)
    steps: list[dict[str, float]] = []
    columns: Columns = {}
    with running_worker(make(training.model, argv, num_processes=rank.world_size, **sections), rank) as worker:
        for batch in training.batches:
            columns |= train_one(worker, batch)
            steps += worker.step_metrics
        return Trace(
            losses=[step[f"{prefix}/{'value_loss' if training.critic else 'loss'}"] for step in steps],
            grad_norms=[step[f"{prefix}/grad_norm"] for step in steps],
            weights=weights_of(worker),
            columns=columns,
        )


def train_policy(worker: Any, batch: RolloutBatch) -> Columns:
    """Train one rollout; what this rank's samples got before the update."""
    worker.train(batch)
    return recorder.take()


def train_critic(worker: Any, batch: RolloutBatch) -> Columns:
    """Value and train one rollout; values of the samples that this rank speaks for."""
    everyone: list[Any] = [None] * worker.parallel.world_size
    dist.all_gather_object(everyone, worker.score(batch))
    values = {sample: row for part in everyone for sample, row in part.items()}
    rng = np.random.default_rng(batch.rollout_id)
    returns = {i: (values[i] + rng.normal(size=len(values[i]))).astype(np.float32) for i in sorted(values)}
    worker.train(batch, values, returns)
    return {(batch.rollout_id, i, "values"): torch.from_numpy(row) for i, row in values.items()}


Planted = Callable[[], AbstractContextManager[Any]]


def run(
    layout_name: str, training: Training, *, planted: Planted = nullcontext, timeout_seconds: float = 120.0
) -> Trace:
    """Train in processes of their own: rank 0's numbers with every rank's columns.

    Args:
        layout_name: See ``layouts``.
        training: What is trained.
        planted: Makes the context in which every rank trains; a module-level function.
        timeout_seconds: Bound on all of it.
    """
    world_size = layout(layout_name).world_size
    return _merged(run_ranks(world_size, _trace, training, layout_name, planted, timeout_seconds=timeout_seconds))


def _trace(rank: Rank, training: Training, layout_name: str, planted: Planted) -> Trace:
    with planted():
        return trace(rank, training, layout_name)


def _merged(traces: Sequence[Trace]) -> Trace:
    first = traces[0]
    columns: Columns = {}
    for one in traces:
        for key, value in one.columns.items():
            assert key not in columns or columns[key].equal(value), f"ranks disagree on {key}"
            columns[key] = value
        assert one.losses == first.losses, "ranks report different losses"
        assert one.grad_norms == first.grad_norms, "ranks report different gradient norms"
    return Trace(losses=first.losses, grad_norms=first.grad_norms, weights=first.weights, columns=columns)


def compare(got: Trace, want: Trace) -> Differences:
    """The largest difference of each kind."""
    assert got.weights.keys() == want.weights.keys()
    assert got.columns.keys() == want.columns.keys()
    assert want.losses, "nothing was trained"
    return Differences(
        loss=max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)),
        grad_norm=max(abs(a - b) / b for a, b in zip(got.grad_norms, want.grad_norms, strict=True)),
        weights=max((got.weights[name] - w).abs().max().item() for name, w in want.weights.items()),
        log_probs=max((_relative(got.columns[key], w) for key, w in want.columns.items()), default=None),
        limit=LIMIT * len(want.losses),
    )


def _relative(got: Tensor, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    return ((got - want).abs() / want.abs().clamp(min=1.0)).max().item()
