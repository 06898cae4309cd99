"""The comparison of layouts notices what it is there for: planted mistakes make it fail, and clearly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import faults
from tests.parallel.models import make_model
from tests.parallel.test_layouts import training
from tests.parallel.traces import LIMIT, Planted, Trace, compare, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-gqa", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def want(model: Path) -> Trace:
    return run("one", training(model, "policy"))


@pytest.mark.parametrize(
    ("layout", "planted"),
    [
        ("tp2_sp", faults.norm_gradients_are_not_summed),
        ("cp2", faults.gradients_are_not_reduced),
        ("dp2", faults.gradients_are_not_reduced),
        ("dp2", faults.data_parallelism_is_not_scaled),
    ],
)
def test_a_fault_fails_the_comparison(layout: str, planted: Planted, model: Path, want: Trace) -> None:
    found = compare(run(layout, training(model, "policy"), planted=planted), want)
    assert not found.passes
    assert found.loss <= LIMIT  # the forward pass is right; only what follows shows the fault
    assert found.weights > 100 * LIMIT
    assert found.grad_norm > 100 * LIMIT
