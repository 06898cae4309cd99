"""However a batch is cut over ranks and micro-batches, several optimizer steps train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.conftest import Table
from tests.parallel.models import make_model
from tests.parallel.ragged import NUM_ROLLOUTS, ragged_rollout
from tests.parallel.test_layouts import POLICY
from tests.parallel.traces import Trace, Training, run

pytestmark = pytest.mark.timeout(300)

RAGGED = [ragged_rollout(), ragged_rollout(seed=1, rollout_id=1)]
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60}
HALVES = {"global_batch_size": NUM_ROLLOUTS // 2}  # two optimizer steps for each rollout
PER_TOKEN = {"calculate_per_token_loss": True}
SHARED, UNSHARED = {"share_prompt_prefix": True}, {"share_prompt_prefix": False}


def settings(
    data: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    return {
        "data": HALVES | (data or {}),
        "train": train or {},
        "algorithm": POLICY | (algorithm or {}),
    }


CASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "static": ("dp2", settings({"micro_batch_size": 3})),
    "one by one, prompts apart": ("dp2", settings({"micro_batch_size": 1}, UNSHARED)),
    "dynamic": ("dp2", settings(DYNAMIC)),
    "dynamic, prompts apart": ("dp2", settings(DYNAMIC, UNSHARED)),
    "dynamic, balanced by tokens": ("dp2", settings(DYNAMIC | {"balance_data": True})),
    "dynamic, balanced by FLOPs": ("dp2", settings(DYNAMIC | {"balance_data": True, "balance_by_flops": True})),
    "dynamic, own cap for scoring": ("dp2", settings(DYNAMIC | {"log_probs_max_tokens_per_gpu": 25})),
    "dynamic, per token": ("dp2", settings(DYNAMIC, algorithm=PER_TOKEN)),
    "dynamic, per token, cp": ("dp2_cp2", settings(DYNAMIC, SHARED, PER_TOKEN)),
    "dynamic, shared, cp": ("dp2_cp2", settings(DYNAMIC, SHARED)),
    "dynamic, recomputed loss, tp": ("tp2_sp_dp2", settings(DYNAMIC, {"recompute_loss_function": True})),
    "dynamic, interleaved": ("pp2_vpp2_dp2", settings(DYNAMIC)),
    "static, interleaved": ("pp2_vpp2_dp2", settings({"micro_batch_size": 2})),
    "placeholders": ("dp4", settings({"micro_batch_size": 4})),
    "placeholders, cp, per token": ("dp2_cp2", settings({"micro_batch_size": 20}, algorithm=PER_TOKEN)),
    "placeholders, pp": ("pp2_dp4", settings({"micro_batch_size": 4})),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-gqa", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one_by_one(model: Path) -> Callable[[bool], Trace]:
    """One process, one sample per micro-batch, every prompt on its own."""

    def train(per_token: bool) -> Trace:
        plain = settings({"micro_batch_size": 1}, UNSHARED, PER_TOKEN if per_token else None)
        return run("one", Training(model=model, sections=plain, batches=RAGGED))

    return cache(train)


@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_process_sample_by_sample(
    name: str, model: Path, one_by_one: Callable[[bool], Trace], table: Table
) -> None:
    layout, sections = CASES[name]
    training = Training(model=model, sections=sections, batches=RAGGED)
    want = one_by_one("calculate_per_token_loss" in sections["algorithm"])
    assert len(want.losses) == 4
    found = table.compare(layout, name, "policy x4", lambda: run(layout, training), want)
    assert found.passes, found
