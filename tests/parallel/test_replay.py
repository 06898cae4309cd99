"""Kept tokens and replayed experts give the same training under every layout as in one process.

Replayed choices are never those of the routers: they change after they chose, or the engine chose at random. Scoring
packs other rows than training does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.parallel.conftest import Table
from tests.parallel.layouts import layout
from tests.parallel.models import SHAPES, make_model
from tests.parallel.ragged import NUM_ROLLOUTS, ragged_rollout
from tests.parallel.test_layouts import POLICY
from tests.parallel.traces import Trace, Training, run
from tests.support.replay import with_kept_tokens, with_planted_routes

pytestmark = pytest.mark.timeout(300)

SOURCES = {
    "own routes": {"use_routing_replay": True},
    "engine routes": {"use_routing_replay": True, "use_rollout_routing_replay": True},
    "kept tokens": {},
}
SHIFT = {"custom_megatron_before_train_step_hook_path": "tests.support.replay.shift_routers"}
DATA = {
    "global_batch_size": NUM_ROLLOUTS,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 60,
    "log_probs_max_tokens_per_gpu": 25,
}
CASES = [
    *((name, "qwen3-moe", "own routes") for name in ("tp2_sp", "cp2", "pp2_vpp2", "ep2", "tp2_sp_cp2", "ep2_pp2")),
    *((name, "qwen3-moe", "engine routes") for name in ("tp2_sp", "ep2_tp2_sp")),
    *((name, "qwen2-moe", "engine routes") for name in ("pp2", "dp2")),  # its first layer is dense
    *((name, "llama-gqa", "kept tokens") for name in ("tp2_sp_cp2", "pp2")),
]


def training(model: Path, name: str, source: str) -> Training:
    batch = with_kept_tokens(ragged_rollout())
    if source == "engine routes":
        dense = [0] if name == "qwen2-moe" else []
        batch = with_planted_routes(batch, num_layers=4, num_experts=8, topk=2, dense=dense)
    train = SHIFT if source == "own routes" else {}
    sections = {"algorithm": POLICY | {"kl_loss_coef": 0.01} | SOURCES[source], "data": DATA, "train": train}
    return Training(model=model, sections=sections, batches=[batch])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(name, root) for name in SHAPES}


@pytest.fixture(scope="module")
def one_process(models: dict[str, Path]) -> Callable[[str, str], Trace]:
    """The trace of one process for a model and a source."""
    return cache(lambda model, source: run("one", training(models[model], model, source)))


@pytest.mark.parametrize(("layout_name", "model", "source"), sorted(CASES, key=lambda c: (layout(c[0]).world_size, c)))
def test_replays_as_in_one_process(
    layout_name: str,
    model: str,
    source: str,
    models: dict[str, Path],
    one_process: Callable[[str, str], Trace],
    table: Table,
) -> None:
    want = one_process(model, source)
    mine = training(models[model], model, source)
    found = table.compare(layout_name, model, source, lambda: run(layout_name, mine), want)
    assert found.passes, found
