"""On-policy distillation from weights that the trainer holds, against float64 log-probs of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.rollouts import make_rollout, reference_log_probs, rollout_mean
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import LINEAR_ADAM, Case, run_case, running_worker

pytestmark = pytest.mark.timeout(180)

BATCH = make_rollout()
COEF = 0.3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), "qwen3", seed=5)


@pytest.fixture(scope="module")
def ref_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("reference"), "qwen3", seed=6)


def engine(i: int) -> Tensor:
    assert BATCH.rollout_log_probs is not None
    return torch.from_numpy(BATCH.rollout_log_probs[i]).double()


def distil(teacher_dir: Path, **more: Any) -> dict[str, Any]:
    return {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(teacher_dir), "opd_kl_coef": COEF, **more}


def check(metrics: dict[str, float], advantages: list[Tensor], gaps: list[Tensor], teacher: list[Tensor]) -> None:
    want = {
        "rollout/advantages": rollout_mean(BATCH, advantages),
        "rollout/opd_reverse_kl": rollout_mean(BATCH, gaps),
        "train/opd_reverse_kl": rollout_mean(BATCH, gaps),
        "rollout/teacher_log_probs": rollout_mean(BATCH, teacher),
    }
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value.item(), abs=5e-6), name


def test_grpo(model_dir: Path, teacher_dir: Path) -> None:
    temperature = 0.8
    model, student, _ = reference_log_probs(model_dir, BATCH, temperature=temperature)
    _, teacher, _ = reference_log_probs(teacher_dir, BATCH, temperature=temperature)
    gaps = [(s - t).detach() for s, t in zip(student, teacher, strict=True)]
    advantages = [BATCH.rewards[i] - COEF * gap for i, gap in enumerate(gaps)]
    loss = rollout_mean(BATCH, [-(s - s.detach()).exp() * a for s, a in zip(student, advantages, strict=True)])
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)).item()  # type: ignore[union-attr]
    sections = {
        "algorithm": distil(teacher_dir),
        "rollout": {"rollout_temperature": temperature},
        "data": {"global_batch_size": 12, "micro_batch_size": 5},
    }
    outcome = run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=[BATCH]))
    metrics = outcome.metrics[0]
    check(metrics, advantages, gaps, teacher)
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=5e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert "perf/teacher_log_probs_time" in metrics


def test_with_a_kl_penalty_whitening_and_a_reference(model_dir: Path, teacher_dir: Path, ref_dir: Path) -> None:
    _, student, _ = reference_log_probs(model_dir, BATCH)
    _, teacher, _ = reference_log_probs(teacher_dir, BATCH)
    _, ref, _ = reference_log_probs(ref_dir, BATCH)
    gaps = [(s - t).detach() for s, t in zip(student, teacher, strict=True)]
    rows = [
        BATCH.rewards[i] - 0.02 * (s - r).detach() - COEF * gaps[i]
        for i, (s, r) in enumerate(zip(student, ref, strict=True))
    ]
    chosen = torch.cat([a[torch.from_numpy(m).bool()] for a, m in zip(rows, BATCH.loss_masks, strict=True)])
    rows = [(a - chosen.mean()) / torch.sqrt(chosen.var() + 1e-8) for a in rows]
    algorithm = {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.02, "normalize_advantages": True}
    sections = {
        "algorithm": distil(teacher_dir, **algorithm),
        "checkpoint": {"ref_load": str(ref_dir), "load": str(model_dir)},
        "data": {"global_batch_size": 12},
    }
    check(run_case(model_dir, Case(sections=sections, batches=[BATCH])).metrics[0], rows, gaps, teacher)


def test_the_engines_log_probs_can_be_the_students(model_dir: Path, teacher_dir: Path, ref_dir: Path) -> None:
    _, teacher, _ = reference_log_probs(teacher_dir, BATCH)
    _, ref, _ = reference_log_probs(ref_dir, BATCH)
    gaps = [(engine(i) - t).detach() for i, t in enumerate(teacher)]
    rows = [
        BATCH.rewards[i] - 0.02 * (engine(i) - r).detach() - COEF * gap
        for i, (r, gap) in enumerate(zip(ref, gaps, strict=True))
    ]
    chosen = torch.cat([a[torch.from_numpy(m).bool()] for a, m in zip(rows, BATCH.loss_masks, strict=True)])
    rows = [(a - chosen.mean()) / torch.sqrt(chosen.var() + 1e-8) for a in rows]
    algorithm = {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.02, "normalize_advantages": True}
    sections = {
        "algorithm": distil(teacher_dir, use_rollout_logprobs=True, **algorithm),
        "checkpoint": {"ref_load": str(ref_dir), "load": str(model_dir)},
        "data": {"global_batch_size": 12},
    }
    metrics = run_case(model_dir, Case(sections=sections, batches=[BATCH])).metrics[0]
    check(metrics, rows, gaps, teacher)
    assert "perf/log_probs_time" not in metrics


def test_a_teacher_that_is_the_student_changes_nothing(model_dir: Path) -> None:
    sections = {"data": {"global_batch_size": 6}}
    plain = run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=[BATCH]))
    sections = {"data": {"global_batch_size": 6}, "algorithm": distil(model_dir)}
    taught = run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=[BATCH]))
    assert taught.metrics[0]["train/opd_reverse_kl"] == 0
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(taught.weights[name], tensor, rtol=0, atol=0)


def test_a_megatron_checkpoint_teaches_like_the_model_it_was_made_of(
    model_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    data = {"global_batch_size": 12}
    saving = make_config(teacher_dir, checkpoint={"save": str(tmp_path)}, data=data)
    with running_worker(saving) as worker:
        worker.save(3)
        worker.train(BATCH)
        worker.save(4)

    def teacher_log_probs(teacher: Path, **more: Any) -> float:
        case = Case(sections={"data": data, "algorithm": distil(teacher, **more)}, batches=[BATCH])
        return run_case(model_dir, case).metrics[0]["rollout/teacher_log_probs"]

    want = teacher_log_probs(teacher_dir)
    assert teacher_log_probs(tmp_path, opd_teacher_ckpt_step=3) == pytest.approx(want, abs=1e-7)
    assert teacher_log_probs(tmp_path) != pytest.approx(want, abs=1e-7)
