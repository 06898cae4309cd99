"""Whole training steps of the worker on one CUDA device, against float64 losses over transformers' logits.

Tolerances. In fp32 (TF32 off) only the order of sums differs from the reference. In bf16 each matrix product
rounds to 8 bits: a log-prob of a random model of 4 layers is off by about 0.01, a mean over the batch by less,
because the roundings of tokens are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rollouts import reference_log_probs
from tests.support.tiny_models import Family, as_in_files, make_tiny_model
from tests.support.workers import LEARNING_RATE, LINEAR_ADAM, Case, Outcome, run_case, running_worker, weights_of

from tests.integration.megatron.test_step_invariance import BATCH, VARIANTS, case  # isort: skip
from tests.integration.megatron.test_step_reference import CASES  # isort: skip
from slime.backends.megatron import parallel  # isort: skip
from tests.support.training import make_config  # isort: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = {"device": "cuda"}


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest accepted differences: absolute for loss and mean log-prob, relative for the gradient norm."""

    loss: float
    log_prob: float
    grad_norm: float
    update: float
    """Relative distance of the weights' change from the reference's."""


TOLERANCES = {
    "fp32": Tolerance(loss=2e-5, log_prob=2e-5, grad_norm=1e-4, update=1e-3),
    "bf16": Tolerance(loss=1e-2, log_prob=1e-2, grad_norm=3e-2, update=0.15),
}
# A bf16 weight near 0.1 moves in steps of 5e-4: the update has to be large beside that to be seen in it.
LARGE_STEP = ("--lr", "10", *LINEAR_ADAM[2:])


@pytest.fixture(autouse=True)
def _exact_fp32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    parallel.destroy()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=4)


def on_device(sections: dict[str, Any], precision: str) -> dict[str, Any]:
    train = sections.get("train", {}) | {"precision": precision}
    return sections | {"cluster": sections.get("cluster", {}) | CUDA, "train": train}


def assert_step_equals_float64(folder: Path, name: str, precision: str, limit: Tolerance) -> None:
    algorithm, temperature, loss_of = CASES[name]
    model, log_probs, entropies = reference_log_probs(folder, BATCH, temperature=temperature)
    loss = loss_of(log_probs, entropies)
    loss.backward()
    grads = as_in_files({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt().item()
    sections = {
        "algorithm": algorithm,
        "rollout": {"rollout_temperature": temperature},
        "data": {"global_batch_size": 12, "micro_batch_size": 5},
    }
    argv = LARGE_STEP if precision == "bf16" else LINEAR_ADAM
    outcome = run_case(folder, Case(argv=argv, sections=on_device(sections, precision), batches=[BATCH]))
    metrics = outcome.metrics[0]
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=limit.loss)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=limit.grad_norm)
    assert_updated(outcome.weights, as_in_files(model.state_dict()), grads, precision, limit)


def assert_updated(
    found: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    grads: Mapping[str, torch.Tensor],
    precision: str,
    limit: Tolerance,
) -> None:
    """Weights after the first step of Adam with epsilon 1; one without a gradient has not moved."""
    rate = 10.0 if precision == "bf16" else LEARNING_RATE
    error = size = 0.0
    for key, tensor in found.items():
        grad = grads.get(key, torch.zeros_like(before[key]))
        wanted = -rate * grad / (grad.abs() + 1)
        moved = tensor.double().cpu() - before[key].detach().double()
        error += (moved - wanted).square().sum().item()
        size += wanted.square().sum().item()
    assert (error / size) ** 0.5 < limit.update


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_float64(name: str, precision: str, model_dir: Path) -> None:
    assert_step_equals_float64(model_dir, name, precision, TOLERANCES[precision])


# Some token's choice of experts falls otherwise in bf16, which moves it by more than rounding.
ROUTED = TOLERANCES | {"bf16": Tolerance(loss=5e-2, log_prob=5e-2, grad_norm=0.2, update=0.5)}


@pytest.mark.parametrize("precision", ROUTED)
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_a_step_of_a_mixture_of_experts_equals_float64(family: Family, precision: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family)
    assert_step_equals_float64(folder, "temperature", precision, ROUTED[precision])


@pytest.mark.parametrize("precision", TOLERANCES)
def test_cutting_packing_and_recomputing_change_nothing(precision: str, model_dir: Path) -> None:
    def outcome(**changes: Any) -> Outcome:
        made = case(**changes)
        return run_case(model_dir, replace(made, sections=on_device(made.sections, precision)))

    want, limit = outcome(train={"share_prompt_prefix": False}), TOLERANCES[precision]
    for name, changes in VARIANTS.items():
        got = outcome(**changes)
        # The first rollout only: after it, the weights carry the differences of the first step.
        mine, theirs = got.metrics[0], want.metrics[0]
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], abs=limit.loss), name
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=limit.grad_norm), name
        assert mine["rollout/log_probs"] == pytest.approx(theirs["rollout/log_probs"], abs=limit.log_prob), name


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_checkpoint_continues(precision: str, model_dir: Path, tmp_path: Path) -> None:
    def config(load: Path | None) -> Any:
        return make_config(
            model_dir,
            ("--lr", "1e-3"),
            cluster=CUDA,
            train={"precision": precision},
            data={"global_batch_size": 12, "micro_batch_size": 5},
            checkpoint={"save": str(tmp_path), "load": None if load is None else str(load)},
        )

    batches = [replace(BATCH, rollout_id=i) for i in range(3)]
    with running_worker(config(None)) as worker:
        worker.train(batches[0])
        worker.save(0)
        saved = weights_of(worker)
        want = [worker.train(batch)["train/grad_norm"] for batch in batches[1:]]
    with running_worker(config(tmp_path)) as worker:
        assert worker.first_rollout_id == 1
        assert all(torch.equal(tensor, saved[name]) for name, tensor in weights_of(worker).items())
        got = [worker.train(batch)["train/grad_norm"] for batch in batches[1:]]
    # Sums by atomic additions come in any order on this device, so that equal weights give nearly equal gradients.
    assert got == pytest.approx(want, rel=1e-5 if precision == "fp32" else 1e-2)
