"""Every parallel layout trains as one process does, through the worker that a run uses.

One optimizer step on a ragged batch: loss, gradient norm, every exported weight and, where scoring passes run,
every token's log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.parallel.conftest import Table
from tests.parallel.layouts import layout
from tests.parallel.models import SHAPES, make_model
from tests.parallel.traces import DYNAMIC, Trace, Training, run

pytestmark = pytest.mark.timeout(900)

POLICY = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "kl_coef": 0.01,  # needs the log-probs before the update, so a pass without loss scores them
    "entropy_coef": 0.01,
    "use_tis": True,
    "advantage_estimator": "reinforce_plus_plus_baseline",
    "normalize_advantages": True,
}
SFT = {"loss_type": "sft_loss", "calculate_per_token_loss": True, "compute_advantages_and_returns": False}
VALUE = {"value_clip": 0.3}
LOSSES = {
    "policy": {"algorithm": POLICY, "data": DYNAMIC},
    "sft": {"algorithm": SFT, "data": DYNAMIC},
    "value": {"algorithm": VALUE, "data": DYNAMIC},
}
COLUMNS = {"policy": {"log_probs", "ref_log_probs", "advantages"}, "sft": set(), "value": {"values"}}
"""What passes without a loss give, before the update."""


COMBINED = ("tp2_sp_cp2", "pp2_cp2", "tp2_sp_pp2_dp2", "tp2_sp_pp2_cp2")
CASES = [
    *(
        (name, "llama-gqa", loss)
        for loss in LOSSES
        for name in ("tp2", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "dp2", "dp2_overlap", *COMBINED)
    ),
    *((name, "qwen2-tied", "policy") for name in ("pp2", "tp2_sp", "tp2_pp2", "dp2")),
    ("pp2", "qwen2-tied", "sft"),
    *((name, "qwen3", "policy") for name in ("tp2_sp", "cp2", "pp2")),
    *(
        (name, "qwen3-moe", "policy")
        for name in ("ep2", "ep2_etp2", "ep2_pp2", "ep2_tp2_sp", "ep2_tp2_sp_etp1", "tp2_sp", "pp2_vpp2", "cp2", "dp2")
    ),
    *((name, "qwen2-moe", "policy") for name in ("ep2", "ep2_tp2_sp_cp2", "pp2")),
    *(("ep2", "qwen3-moe", loss) for loss in ("sft", "value")),
    *((name, "qwen2-tied", "value") for name in ("pp2", "tp2_pp2")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(name, root) for name in SHAPES}


@pytest.fixture(scope="module")
def one_process(models: dict[str, Path]) -> Callable[[str, str], Trace]:
    """The trace of one process for a model and a loss."""
    return cache(lambda model, loss: run("one", training(models[model], loss)))


def training(model: Path, loss: str) -> Training:
    return Training(model=model, sections=LOSSES[loss], critic=loss == "value")


@pytest.mark.parametrize(("layout_name", "model", "loss"), sorted(CASES, key=lambda c: (layout(c[0]).world_size, c)))
def test_trains_as_one_process(
    layout_name: str,
    model: str,
    loss: str,
    models: dict[str, Path],
    one_process: Callable[[str, str], Trace],
    table: Table,
) -> None:
    want = one_process(model, loss)
    found = table.compare(layout_name, model, loss, lambda: run(layout_name, training(models[model], loss)), want)
    assert found.passes, found
    assert {column for _, _, column in want.columns} == COLUMNS[loss]
