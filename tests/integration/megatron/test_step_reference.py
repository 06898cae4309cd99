"""The training step on one rank against float64 losses over transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.rollouts import make_rollout, reference_log_probs, rollout_mean
from tests.support.tiny_models import Family, as_in_files, make_tiny_model
from tests.support.workers import LEARNING_RATE, LINEAR_ADAM, Case, run_case

pytestmark = pytest.mark.timeout(180)

BATCH = make_rollout()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def rewards(i: int) -> float:
    return BATCH.rewards[i]


def engine(i: int) -> Tensor:
    assert BATCH.rollout_log_probs is not None
    return torch.from_numpy(BATCH.rollout_log_probs[i]).double()


def masked_mean(x: Tensor, i: int) -> Tensor:
    return x[torch.from_numpy(BATCH.loss_masks[i]).bool()].mean()


def on_policy(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """GRPO, first step: the ratio is 1, its gradient is not 0."""
    del entropies
    return rollout_mean(BATCH, [-(p - p.detach()).exp() * rewards(i) for i, p in enumerate(log_probs)])


def with_entropy(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    return on_policy(log_probs, entropies) - 0.05 * rollout_mean(BATCH, entropies)


def off_policy(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """The engine's log-probs are the old ones, far from the current ones: the clip is active."""
    del entropies
    rows = []
    for i, p in enumerate(log_probs):
        r = (p - engine(i)).exp()
        rows.append(torch.maximum(-r * rewards(i), -r.clamp(0.8, 1.3) * rewards(i)))
    return rollout_mean(BATCH, rows)


def sequence_ratio(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    del entropies
    rows = []
    for i, p in enumerate(log_probs):
        r = masked_mean(p - p.detach(), i).exp().expand(len(p))
        rows.append(torch.maximum(-r * rewards(i), -r.clamp(0.8, 1.3) * rewards(i)))
    return rollout_mean(BATCH, rows)


def clipped_weight(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    del entropies
    rows = []
    for i, p in enumerate(log_probs):
        rows.append(-(p.detach() - engine(i)).exp().clamp(0.8, 1.3) * rewards(i) * p)
    return rollout_mean(BATCH, rows)


def truncated_weights(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    del entropies
    rows = []
    for i, p in enumerate(log_probs):
        weight = (p.detach() - engine(i)).exp().clamp(0.0, 0.05)
        rows.append(-(p - p.detach()).exp() * rewards(i) * weight)
    return rollout_mean(BATCH, rows)


def constant_denominator(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """Dr. GRPO: token sums over a constant, mean over rollouts."""
    del entropies
    masks = [torch.from_numpy(m).double() for m in BATCH.loss_masks]
    sums = [(-(p - p.detach()).exp() * rewards(i) * masks[i]).sum() for i, p in enumerate(log_probs)]
    return torch.stack(sums).sum() / 9 / len(set(BATCH.rollout_ids))


def normalised_weights(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """Weights over their mean of all trained tokens of the rollout."""
    del entropies
    weights = [(p.detach() - engine(i)).exp().clamp(0.02, 0.05) for i, p in enumerate(log_probs)]
    chosen = torch.cat([w[torch.from_numpy(m).bool()] for w, m in zip(weights, BATCH.loss_masks, strict=True)])
    rows = [
        -(p - p.detach()).exp() * rewards(i) * w / chosen.mean()
        for i, (p, w) in enumerate(zip(log_probs, weights, strict=True))
    ]
    return rollout_mean(BATCH, rows)


def rejected_in_bypass(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """The engine's log-probs are the old ones; tokens far from the trainer's leave the loss."""
    del entropies
    rows = []
    for i, p in enumerate(log_probs):
        r = (p - engine(i)).exp()
        kept = (r.detach() >= 0.03) & (r.detach() <= 0.2)
        rows.append(torch.maximum(-r * rewards(i), -r.clamp(0.8, 1.2) * rewards(i)) * kept)
    return rollout_mean(BATCH, rows)


def per_token(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    del entropies
    masks = torch.cat([torch.from_numpy(m) for m in BATCH.loss_masks]).double()
    flat = torch.cat([-(p - p.detach()).exp() * rewards(i) for i, p in enumerate(log_probs)])
    return (flat * masks).sum() / masks.sum()


def supervised(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    del entropies
    return rollout_mean(BATCH, [-p for p in log_probs])


CASES: dict[str, tuple[dict[str, Any], float, Callable[[list[Tensor], list[Tensor]], Tensor]]] = {
    "grpo": ({}, 1.0, on_policy),
    "temperature": ({"entropy_coef": 0.05}, 0.7, with_entropy),
    "off_policy": ({"use_rollout_logprobs": True, "eps_clip_high": 0.3}, 1.0, off_policy),
    "gspo": ({"advantage_estimator": "gspo", "eps_clip_high": 0.3}, 1.0, sequence_ratio),
    "cispo": (
        {"advantage_estimator": "cispo", "use_rollout_logprobs": True, "eps_clip_high": 0.3},
        1.0,
        clipped_weight,
    ),
    "tis": ({"use_tis": True, "tis_clip": 0.05}, 1.0, truncated_weights),
    "constant_denominator": ({"constant_loss_denominator": 9}, 1.0, constant_denominator),
    "normalised_weights": (
        {"use_tis": True, "tis_mode": "clip", "tis_lower_bound": 0.02, "tis_clip": 0.05, "tis_batch_normalize": True},
        1.0,
        normalised_weights,
    ),
    "rejected_in_bypass": (
        {"use_rollout_logprobs": True, "use_rs": True, "rs_lower_bound": 0.03, "rs_upper_bound": 0.2},
        1.0,
        rejected_in_bypass,
    ),
    "measured_only": ({"get_mismatch_metrics": True}, 1.0, on_policy),
    "per_token": ({"calculate_per_token_loss": True}, 1.0, per_token),
    "sft": ({"loss_type": "sft_loss", "compute_advantages_and_returns": False}, 1.0, supervised),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_norm_and_weights(name: str, model_dir: Path) -> None:
    algorithm, temperature, loss_of = CASES[name]
    check_step(model_dir, algorithm, temperature, loss_of)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_a_mixture_of_experts(family: Family, tmp_path: Path) -> None:
    """Prompts are shared between the samples of a group here and not in the reference."""
    check_step(make_tiny_model(tmp_path, family), {"entropy_coef": 0.05}, 0.7, with_entropy)


def check_step(
    model_dir: Path,
    algorithm: dict[str, Any],
    temperature: float,
    loss_of: Callable[[list[Tensor], list[Tensor]], Tensor],
) -> None:
    model, log_probs, entropies = reference_log_probs(model_dir, BATCH, temperature=temperature)
    loss = loss_of(log_probs, entropies)
    loss.backward()
    grads = as_in_files({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    norm = torch.sqrt(sum(g.square().sum() for g in grads.values())).item()  # type: ignore[union-attr]

    sections = {
        "algorithm": algorithm,
        "rollout": {"rollout_temperature": temperature},
        "data": {"global_batch_size": 12, "micro_batch_size": 5},
    }
    outcome = run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=[BATCH]))
    metrics = outcome.metrics[0]
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    before = as_in_files(model.state_dict())
    assert outcome.weights.keys() == before.keys()
    for key, tensor in outcome.weights.items():
        step = LEARNING_RATE * grads[key] / (grads[key].abs() + 1) if key in grads else 0.0
        torch.testing.assert_close(tensor.double(), before[key].detach().double() - step, atol=1e-6, rtol=1e-6)


def test_kl_loss_and_rollout_metrics(model_dir: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "reference", "qwen3", seed=5)
    _, log_probs, entropies = reference_log_probs(model_dir, BATCH)
    _, ref, _ = reference_log_probs(other, BATCH)
    kl = rollout_mean(BATCH, [((r - p).exp() - 1 + p - r).clamp(-10, 10) for p, r in zip(log_probs, ref, strict=True)])
    sections = {
        "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
        "checkpoint": {"ref_load": str(other), "load": str(model_dir)},
        "data": {"global_batch_size": 12},
    }
    metrics = run_case(model_dir, Case(sections=sections, batches=[BATCH])).metrics[0]
    want = {
        "train/kl_loss": kl,
        "train/loss": on_policy(log_probs, entropies) + 0.1 * kl,
        "train/entropy_loss": rollout_mean(BATCH, entropies),
        "rollout/log_probs": rollout_mean(BATCH, log_probs),
        "rollout/ref_log_probs": rollout_mean(BATCH, ref),
        "rollout/rollout_log_probs": rollout_mean(BATCH, [engine(i) for i in range(len(BATCH))]),
        "train/train_rollout_logprob_abs_diff": rollout_mean(
            BATCH, [(p - engine(i)).abs() for i, p in enumerate(log_probs)]
        ),
    }
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value.item(), abs=5e-6), name
    assert "perf/ref_log_probs_time" in metrics
    assert "perf/log_probs_time" not in metrics


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_with_kl_penalty(estimator: str, model_dir: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "reference", "qwen3", seed=5)
    _, log_probs, _ = reference_log_probs(model_dir, BATCH)
    _, ref, _ = reference_log_probs(other, BATCH)
    rows = []
    for i, (p, r) in enumerate(zip(log_probs, ref, strict=True)):
        mask = torch.from_numpy(BATCH.loss_masks[i]).double()
        penalty = -0.02 * (p - r).detach()
        if estimator.endswith("baseline"):
            rows.append(rewards(i) + penalty)
            continue
        token_rewards = penalty * mask
        token_rewards[int(mask.nonzero()[-1])] += rewards(i)
        rows.append(token_rewards.flip(0).cumsum(0).flip(0))
    chosen = torch.cat([a[torch.from_numpy(m).bool()] for a, m in zip(rows, BATCH.loss_masks, strict=True)])
    rows = [(a - chosen.mean()) / torch.sqrt(chosen.var() + 1e-8) for a in rows]
    sections = {
        "algorithm": {"advantage_estimator": estimator, "kl_coef": 0.02, "normalize_advantages": True},
        "checkpoint": {"ref_load": str(other), "load": str(model_dir)},
        "data": {"global_batch_size": 12},
    }
    metrics = run_case(model_dir, Case(sections=sections, batches=[BATCH])).metrics[0]
    assert metrics["rollout/advantages"] == pytest.approx(rollout_mean(BATCH, rows).item(), abs=5e-6)
    assert metrics["train/loss"] == pytest.approx(rollout_mean(BATCH, [-a for a in rows]).item(), abs=5e-6)


def test_old_pass_runs_exactly_when_it_must(model_dir: Path) -> None:
    def ran(data: dict[str, Any], **algorithm: Any) -> bool:
        case = Case(sections={"algorithm": algorithm, "data": data}, batches=[BATCH])
        return "perf/log_probs_time" in run_case(model_dir, case).metrics[0]

    one, two = {"global_batch_size": 12}, {"global_batch_size": 6}
    assert not ran(one)
    assert ran(two)
    assert not ran(two, use_rollout_logprobs=True)
    assert not ran(one, use_rollout_logprobs=True, use_rs=True)
    assert ran(two, use_rollout_logprobs=True, use_rs=True)
    assert ran(one, use_tis=True, tis_batch_normalize=True)
    assert ran(one, get_mismatch_metrics=True)
    assert ran(one, advantage_estimator="gspo")


def test_several_steps_per_rollout_use_the_log_probs_from_before_the_first(model_dir: Path) -> None:
    sections = {"data": {"global_batch_size": 4}}
    batches = [BATCH, replace(BATCH, rollout_id=1)]
    outcome = run_case(model_dir, Case(argv=("--lr", "1e-2"), sections=sections, batches=batches))
    kls = [[step["train/ppo_kl"] for step in steps] for steps in outcome.steps]
    assert [len(k) for k in kls] == [3, 3]
    assert all(abs(k[0]) < 1e-6 for k in kls)
    assert all(abs(x) > 1e-4 for k in kls for x in k[1:])
    assert [step["train/step"] for steps in outcome.steps for step in steps] == [0, 1, 2, 3, 4, 5]
