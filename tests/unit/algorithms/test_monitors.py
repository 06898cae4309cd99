"""Monitors against sorted values and plain means in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms import ALGORITHMS
from slime.algorithms.monitors import NUM_BINS, RELATIVE_RESOLUTION, extremes, log_histogram, quantile_of
from slime.algorithms.objective import ClipRange, Objective, ObjectiveSettings, PolicyInputs, policy_objective
from slime.algorithms.reduction import TokenReducer


def quantile(values: list[float], q: float = 0.99) -> float | None:
    x = torch.tensor(values, dtype=torch.float64)
    return quantile_of(log_histogram(x, torch.ones_like(x)).tolist(), q)


@given(st.lists(st.floats(1e-6, 900), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_within_the_stated_resolution(values: list[float], q: float) -> None:
    want = sorted(values)[math.ceil(q * len(values)) - 1]
    assert quantile(values, q) == pytest.approx(want, rel=1.001 * RELATIVE_RESOLUTION)


@pytest.mark.parametrize(
    ("values", "want"),
    [([], None), ([0.0], 0.0), ([1e-9], 0.0), ([1e5], math.inf), ([math.nan], math.inf), ([math.inf], math.inf)],
)
def test_ends_of_the_histogram(values: list[float], want: float | None) -> None:
    assert quantile(values) == want


def test_one_outlier_in_a_hundred_is_not_the_p99() -> None:
    assert quantile([1.0] * 99 + [100.0]) == pytest.approx(1.0, rel=1.001 * RELATIVE_RESOLUTION)
    assert quantile([1.0] * 98 + [100.0] * 2) == pytest.approx(100.0, rel=1.001 * RELATIVE_RESOLUTION)


def test_histograms_of_parts_add_up_and_masked_tokens_do_not_count() -> None:
    x = torch.rand(50, generator=torch.Generator().manual_seed(0))
    mask = (x > 0.3).float()
    whole = log_histogram(x, mask)
    assert whole.shape == (NUM_BINS,)
    assert whole.sum() == mask.sum()
    assert torch.equal(log_histogram(x[:7], mask[:7]) + log_histogram(x[7:], mask[7:]), whole)


def test_extremes() -> None:
    x = torch.tensor([3.0, -7.0, 2.0, math.nan])
    assert [v.item() for v in extremes(x, torch.tensor([1.0, 0, 1, 0]))] == [2, 3]
    assert [v.item() for v in extremes(x, torch.zeros(4))] == [math.inf, -math.inf]
    assert [v.item() for v in extremes(x[:0], x[:0])] == [math.inf, -math.inf]


def objective(dual: float | None = None, name: str = "grpo") -> tuple[PolicyInputs, Objective]:
    generator = torch.Generator().manual_seed(3)
    columns = {
        column: torch.randn(40, generator=generator)
        for column in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "entropy")
    }
    mask = (torch.rand(40, generator=generator) > 0.3).float()
    x = PolicyInputs(**columns, mask=mask, lengths=(14, 26))
    settings = ObjectiveSettings(clip=ClipRange(low=0.2, high=0.2, dual=dual))
    return x, policy_objective(x, ALGORITHMS[name].form, settings, TokenReducer.per_token(mask))


def test_every_monitor_is_logged_without_being_asked_for() -> None:
    x, got = objective()
    assert x.old_log_probs is not None
    assert x.rollout_log_probs is not None
    assert x.entropy is not None
    kept = x.mask.bool()
    t, e = x.old_log_probs[kept].double(), x.rollout_log_probs[kept].double()
    ratio = (x.log_probs[kept].double() - t).exp()
    want_sums = {
        "train_rollout_logprob_abs_diff": (t - e).abs().sum(),
        "train_rollout_kl_k1": (e - t).sum(),
        "train_rollout_kl_k3": ((t - e).exp() - 1 - (t - e)).sum(),
        "entropy": x.entropy[kept].double().sum(),
        "ppo_kl": (t - x.log_probs[kept].double()).sum(),
        "rejected_frac": torch.zeros(()),
    }
    for name, value in want_sums.items():
        assert got.sums[name].item() == pytest.approx(value.item(), abs=1e-4), name
    assert got.maxima["train_rollout_logprob_abs_diff_max"].item() == pytest.approx((t - e).abs().max().item())
    for name, values in {"ratio": ratio, "train_rollout_ratio": (t - e).exp()}.items():
        assert got.minima[f"{name}_min"].item() == pytest.approx(values.min().item(), rel=1e-5)
        assert got.maxima[f"{name}_max"].item() == pytest.approx(values.max().item(), rel=1e-5)
    assert got.histograms["train_rollout_logprob_abs_diff"].sum() == kept.sum()


def test_tokens_held_by_the_dual_clip_are_counted() -> None:
    x, got = objective(dual=1.2)
    assert x.old_log_probs is not None
    held = (x.mask > 0) & (x.advantages < 0) & ((x.log_probs - x.old_log_probs).exp() > 1.2)
    assert held.any()
    assert got.sums["pg_clipfrac_lower"].item() == held.sum().item()
    assert "pg_clipfrac_lower" not in objective()[1].sums
    assert "pg_clipfrac_lower" not in objective(dual=1.2, name="cispo")[1].sums


def test_means_have_their_own_weights() -> None:
    x, _ = objective()
    settings = ObjectiveSettings(clip=ClipRange(low=0.2, high=0.2))
    loss_weights = TokenReducer(mask=x.mask, denominators=torch.full_like(x.mask, 100.0))
    plain = policy_objective(x, ALGORITHMS["grpo"].form, settings, TokenReducer.per_token(x.mask))
    got = policy_objective(
        x, ALGORITHMS["grpo"].form, settings, loss_weights, metric_reducer=TokenReducer.per_token(x.mask)
    )
    losses = {"loss", "pg_loss", "entropy_loss"}
    for name, value in plain.sums.items():
        assert got.sums[name].item() == pytest.approx(value.item() / (100 if name in losses else 1), rel=1e-5), name


def test_without_engine_log_probs_nothing_is_compared() -> None:
    x, _ = objective()
    settings = ObjectiveSettings(clip=ClipRange(low=0.2, high=0.2))
    bare = replace(x, rollout_log_probs=None)
    got = policy_objective(bare, ALGORITHMS["grpo"].form, settings, TokenReducer.per_token(x.mask))
    assert not [name for name in (*got.sums, *got.maxima, *got.histograms) if "rollout" in name]
