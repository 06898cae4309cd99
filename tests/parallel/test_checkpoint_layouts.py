"""A checkpoint of any layout continues under any other with the loss series of an uninterrupted single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from slime.types import RolloutBatch
from tests.parallel.layouts import layout
from tests.parallel.models import make_model
from tests.parallel.ragged import ragged_rollout
from tests.parallel.test_layouts import POLICY
from tests.parallel.traces import DYNAMIC, LIMIT, Trace
from tests.support.gloo import Rank, run_ranks
from tests.support.training import make_config
from tests.support.workers import running_worker, weights_of

pytestmark = pytest.mark.timeout(300)

# The second and third step depend on both moments and on the step count; eps keeps rounding from flipping signs.
OPTIMIZER = ("--lr", "0.05", "--adam-eps", "0.01", "--adam-beta1", "0.8", "--adam-beta2", "0.9", "--clip-grad", "1e9")
OPTIMIZER += ("--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--weight-decay", "0.01")
# KL and entropy make the loss depend on the weights; of an on-policy step it is else the mean advantage.
OBJECTIVE = POLICY | {"entropy_coef": 0.1, "kl_loss_coef": 0.5}
BATCHES = [ragged_rollout(seed=i, rollout_id=i) for i in range(3)]

LAYOUTS = {
    "llama-gqa": ("one", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "dp2", "tp2_sp_pp2_dp2"),
    "qwen2-tied": ("one", "tp2_pp2", "dp2"),
    "deepseek-half": ("one", "pp2", "ep2"),
    "qwen3-moe": ("one", "ep2", "ep2_pp2", "ep2_etp2", "ep2_tp2_sp_etp1"),
}
PAIRS = [(model, saved, loaded) for model, names in LAYOUTS.items() for saved in names for loaded in names]


def train(
    rank: Rank,
    model: Path,
    layout_name: str,
    root: Path,
    batches: Sequence[RolloutBatch],
    *,
    load: bool = False,
    save_after: int | None = None,
    argv: Sequence[str] = (),
) -> Trace:
    """Train batches; the losses and gradient norms of each, and the last weights."""
    checkpoint = {"save": str(root), "load": str(root) if load else None}
    config = make_config(
        model,
        (*OPTIMIZER, *layout(layout_name).argv, *argv),
        num_processes=rank.world_size,
        data=DYNAMIC | {"num_rollout": 4},
        algorithm=OBJECTIVE,
        checkpoint=checkpoint,
    )
    losses, norms = [], []
    with running_worker(config, rank) as worker:
        assert worker.first_rollout_id == batches[0].rollout_id
        for batch in batches:
            metrics = worker.train(batch)
            losses.append(metrics["train/loss"])
            norms.append(metrics["train/grad_norm"])
            if batch.rollout_id == save_after:
                worker.save(batch.rollout_id)
        return Trace(losses=losses, grad_norms=norms, weights=weights_of(worker), columns={})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(name, root) for name in LAYOUTS}


@pytest.fixture(scope="module")
def saved(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Trace]]:
    """Directory of a checkpoint after the first rollout, and the trace of training on without stopping."""

    @cache
    def of(model: str, name: str) -> tuple[Path, Trace]:
        root = tmp_path_factory.mktemp("checkpoint")
        return root, run_ranks(layout(name).world_size, train, models[model], name, root, BATCHES, save_after=0)[0]

    return of


@pytest.mark.parametrize(("model", "saved_under", "loaded_under"), PAIRS)
def test_continues_with_the_same_losses(
    model: str,
    saved_under: str,
    loaded_under: str,
    models: dict[str, Path],
    saved: Callable[[str, str], tuple[Path, Trace]],
) -> None:
    root, uninterrupted = saved(model, saved_under)
    _, want = saved(model, "one")
    world_size = layout(loaded_under).world_size
    got = run_ranks(world_size, train, models[model], loaded_under, root, BATCHES[1:], load=True)[0]
    for mine, theirs in zip(got.losses, want.losses[1:], strict=True):
        assert abs(mine - theirs) <= LIMIT
    for mine, theirs in zip(got.grad_norms, want.grad_norms[1:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    if saved_under == loaded_under:
        assert got.losses == uninterrupted.losses[1:]
        assert got.grad_norms == uninterrupted.grad_norms[1:]
        assert all(got.weights[name].equal(tensor) for name, tensor in uninterrupted.weights.items())


def test_without_the_state_of_the_optimizer_the_losses_are_others(
    models: dict[str, Path], saved: Callable[[str, str], tuple[Path, Trace]]
) -> None:
    root, want = saved("llama-gqa", "one")
    rank_losses = run_ranks(
        1, train, models["llama-gqa"], "one", root, BATCHES[1:], load=True, argv=("--no-load-optim",)
    )[0].losses
    assert abs(rank_losses[1] - want.losses[2]) > 100 * LIMIT
