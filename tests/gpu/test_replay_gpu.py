"""Replay of routes and of kept tokens on one CUDA device.

Tolerances. Replayed routes are the same set of experts whatever the precision. Restricted log-probs are held to
2e-5 of float64 in fp32 (order of sums) and to 2e-2 in bf16 (8 bits in each matrix product).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.megatron.test_routing_replay import BATCH, OWN, RECOMPUTE, SHIFT
from tests.integration.megatron.test_truncated_sampling import BATCH as CUT_BATCH
from tests.integration.megatron.test_truncated_sampling import case, masked_log_probs
from tests.support.replay import Choices, watched_routers
from tests.support.rollouts import rollout_mean
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import LINEAR_ADAM, run_case, running_worker

from slime.backends.megatron import parallel  # isort: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = {"device": "cuda"}


@pytest.fixture(autouse=True)
def _exact_fp32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    parallel.destroy()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("argv", [(), RECOMPUTE], ids=["kept", "recomputed"])
def test_training_goes_where_the_old_pass_went(tmp_path: Path, argv: tuple[str, ...], precision: str) -> None:
    folder = make_tiny_model(tmp_path, "qwen2_moe", num_hidden_layers=3)
    data = {"global_batch_size": 6, "micro_batch_size": 4}
    train = {"precision": precision}

    def watched(train: dict[str, str]) -> tuple[Choices, list[dict[str, float]]]:
        config = make_config(folder, (*LINEAR_ADAM, *argv), algorithm=OWN, data=data, train=train, cluster=CUDA)
        with running_worker(config) as worker:
            with watched_routers(worker) as choices:
                worker.train(BATCH)
            return choices, worker.step_metrics

    choices, _ = watched(train | SHIFT)
    assert choices.scoring.keys() == choices.training.keys()
    assert all(set(seen) == set(choices.scoring[key]) for key, seen in choices.training.items())
    _, steps = watched(train)
    assert abs(steps[0]["train/ppo_kl"]) < (1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-5), ("bf16", 2e-2)])
def test_log_probs_are_restricted_to_the_kept_tokens(tmp_path: Path, precision: str, bound: float) -> None:
    folder = make_tiny_model(tmp_path, "qwen2")
    log_probs, _ = masked_log_probs(folder)
    made = case(train={"precision": precision})
    outcome = run_case(folder, replace(made, sections=made.sections | {"cluster": CUDA}))
    want = rollout_mean(CUT_BATCH, log_probs).item()
    assert outcome.metrics[0]["rollout/log_probs"] == pytest.approx(want, abs=bound)
    assert outcome.metrics[0]["rollout/ref_log_probs"] == pytest.approx(want, abs=bound)
    assert abs(outcome.steps[0][0]["train/ppo_kl"]) < bound / 2
