"""Training workers for integration tests: one rank in this process, or several layouts in spawned ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime.algorithms.monitors import RELATIVE_RESOLUTION
from slime.config import Config
from slime.types import RolloutBatch
from tests.support.gloo import Rank, free_port
from tests.support.training import make_config

# The first Adam step is then lr g / (|g| + 1): weights show differences of gradients linearly instead of by sign.
LEARNING_RATE = 0.1
LINEAR_ADAM = ("--lr", str(LEARNING_RATE), "--adam-eps", "1.0", "--clip-grad", "1e9", "--lr-decay-style", "constant")
LINEAR_ADAM += ("--weight-decay", "0.0")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration and the rollouts it trains."""

    argv: Sequence[str] = ()
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    batches: Sequence[RolloutBatch] = ()
    num_processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Metrics of each rollout, and the weights afterwards under their Hugging Face names (on rank 0)."""

    metrics: list[dict[str, float]]
    steps: list[list[dict[str, float]]]
    weights: dict[str, torch.Tensor]


@contextmanager
def running_worker(config: Config, rank: Rank | None = None) -> Iterator[Any]:
    """An initialised worker of the configured role; it leaves its groups at the end. Gets ``first_rollout_id``."""
    from slime.backends.megatron.critic import CriticWorker
    from slime.backends.megatron.worker import MegatronWorker

    rank = rank or Rank(0, 1, free_port())
    worker_class = CriticWorker if config.role == "critic" else MegatronWorker
    worker = worker_class(config, rank.rank, rank.world_size, "127.0.0.1", rank.port)
    try:
        worker.first_rollout_id = worker.init()
        yield worker
    finally:
        worker.close()
        _let_go(worker)


def _let_go(worker: Any) -> None:
    """Take a closed worker's model apart, so that its process groups go.

    Autograd holds Megatron's gradient hooks, and these hold model and groups, where the garbage collector cannot see
    it. A worker ends with its process; here the threads and sockets of all groups of all tests would add up.
    """
    for chunk in vars(worker).get("chunks", ()):
        for module in [*chunk.modules()]:
            vars(module).clear()
    gc.collect()


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names. Collective; empty but on rank 0."""
    from slime.backends.megatron.export import iter_hf_buckets

    buckets = iter_hf_buckets(worker.chunks, worker.config, 1 << 30)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def run_case(model_dir: Path, case: Case, rank: Rank | None = None) -> Outcome:
    """Train a case's rollouts."""
    config = make_config(model_dir, case.argv, num_processes=case.num_processes, **case.sections)
    with running_worker(config, rank) as worker:
        metrics, steps = [], []
        for batch in case.batches:
            metrics.append(worker.train(batch))
            steps.append(worker.step_metrics)
        return Outcome(metrics=metrics, steps=steps, weights=weights_of(worker))


def run_cases(rank: Rank, model_dir: Path, cases: dict[str, Case], ports: Sequence[int]) -> dict[str, Outcome]:
    """Several cases one after the other in the same processes, each at its own port. For ``run_ranks``."""
    outcomes: dict[str, Outcome] = {}
    for (name, case), port in zip(cases.items(), ports, strict=True):
        try:
            outcomes[name] = run_case(model_dir, case, Rank(rank.rank, rank.world_size, port))
        except Exception as error:
            raise AssertionError(f"case {name} failed") from error
    return outcomes


def free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago."""
    return [free_port() for _ in range(number)]


def assert_same_training(
    got: Outcome, want: Outcome, *, tolerance: float = 1e-6, weights: float = 2e-6, ignore: Sequence[str] = ()
) -> None:
    """Equal losses, gradient norms and every other training number, and equal weights.

    A ratio's extreme is one token's, in which rounding of its log-prob does not average out; a quantile
    is known to the width of a bin.
    """
    for i, (mine, theirs) in enumerate(zip(got.metrics, want.metrics, strict=True)):
        names = {n for n in theirs if not n.startswith("perf/")} - set(ignore)
        assert names <= mine.keys()
        for name in sorted(names):
            one_token = 10 if name.endswith(("ratio_max", "ratio_min")) else 1
            limit = tolerance * max(1.0, abs(theirs[name])) * (10 if i else 1) * one_token
            if name.endswith("_p99"):
                limit = 2 * RELATIVE_RESOLUTION * abs(theirs[name])
            assert abs(mine[name] - theirs[name]) <= limit, f"rollout {i}, {name}: {mine[name]!r} != {theirs[name]!r}"
    assert got.weights.keys() == want.weights.keys()
    for name, tensor in want.weights.items():
        difference = (got.weights[name] - tensor).abs().max().item()
        assert difference <= weights, f"{name} differs by {difference}"
