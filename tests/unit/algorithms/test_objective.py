"""The assembled objective: against float64, under any split, and with poison behind the mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from slime.algorithms import ALGORITHMS
from slime.algorithms.corrections import Corrected, EngineGap, icepop, truncated_importance
from slime.algorithms.objective import ClipRange, Objective, ObjectiveSettings, PolicyInputs, policy_objective
from slime.algorithms.reduction import TokenReducer

LENGTHS = (4, 2, 5, 3)
ROLLOUTS = (0, 0, 1, 2)
SETTINGS = ObjectiveSettings(
    clip=ClipRange(low=0.2, high=0.3), entropy_coef=0.01, kl_loss_coef=0.1, kl_kind="low_var_kl"
)


def example(dtype: torch.dtype = torch.float32) -> PolicyInputs:
    generator = torch.Generator().manual_seed(4)
    total = sum(LENGTHS)

    def column(spread: float = 0.3, mean: float = -2.0) -> Tensor:
        return (torch.randn(total, generator=generator) * spread + mean).to(dtype)

    mask = (torch.rand(total, generator=generator) > 0.25).to(dtype)
    return PolicyInputs(
        log_probs=column().requires_grad_(),
        entropy=column(0.1, 1.0),
        old_log_probs=column(),
        rollout_log_probs=column(),
        ref_log_probs=column(),
        advantages=column(1.0, 0.0),
        mask=mask,
        lengths=LENGTHS,
    )


def mask_sums(mask: Tensor) -> list[float]:
    per_sample = [float(m.sum()) for m in mask.split(list(LENGTHS))]
    return [sum(s for s, r in zip(per_sample, ROLLOUTS, strict=True) if r == rollout) for rollout in ROLLOUTS]


def run(x: PolicyInputs, name: str = "grpo", settings: ObjectiveSettings = SETTINGS) -> Objective:
    reducer = TokenReducer.per_rollout(x.mask, mask_sums(x.mask), x.lengths)
    return policy_objective(x, ALGORITHMS[name].form, settings, reducer)


def reference(x: PolicyInputs, name: str, correction: str | None) -> float:
    """Sample by sample and token by token in float64."""
    assert x.old_log_probs is not None
    assert x.rollout_log_probs is not None
    assert x.ref_log_probs is not None
    assert x.entropy is not None
    total, position = 0.0, 0
    for length, weight in zip(x.lengths, mask_sums(x.mask), strict=True):
        tokens = [t for t in range(position, position + length) if x.mask[t]]
        position += length
        d = {t: float(x.old_log_probs[t].double() - x.log_probs[t].double()) for t in tokens}
        mean = sum(d.values()) / max(len(tokens), 1)
        for t in tokens:
            kl = mean if name == "gspo" else d[t]
            r, a = float(torch.tensor(-kl, dtype=torch.float64).exp()), float(x.advantages[t])
            clamped = min(max(r, 0.8), 1.3)
            pg = -clamped * a * float(x.log_probs[t]) if name == "cispo" else max(-r * a, -clamped * a)
            w = float((x.old_log_probs[t].double() - x.rollout_log_probs[t].double()).exp())
            if correction == "tis":
                pg *= min(max(w, 0.9), 1.1)
            elif correction == "icepop":
                pg *= w if 0.9 <= w <= 1.1 else 0.0
            delta = float(x.log_probs[t].double() - x.ref_log_probs[t].double())
            k3 = min(float(torch.tensor(-delta, dtype=torch.float64).exp()) - 1 + delta, 10.0)
            total += (pg - 0.01 * float(x.entropy[t]) + 0.1 * k3) / max(weight, 1.0)
    return total


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", [None, "tis", "icepop"])
def test_loss_equals_float64(name: str, correction: str | None) -> None:
    x = example()
    chosen = {"tis": truncated_importance(0.9, 1.1), "icepop": icepop(0.9, 1.1), None: None}[correction]
    got = run(x, name, replace(SETTINGS, correction=chosen))
    assert got.loss.item() == pytest.approx(reference(x, name, correction), abs=1e-5)
    assert got.sums["loss"].item() == got.loss.item()


def part(x: PolicyInputs, samples: Sequence[int]) -> tuple[PolicyInputs, TokenReducer]:
    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    index = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in samples])
    columns = {f.name: getattr(x, f.name) for f in fields(x)}
    cut = {k: v[index] if isinstance(v, Tensor) else v for k, v in columns.items()}
    lengths = tuple(LENGTHS[i] for i in samples)
    sums = mask_sums(x.mask)
    return (
        PolicyInputs(**(cut | {"lengths": lengths})),
        TokenReducer.per_rollout(cut["mask"], [sums[i] for i in samples], lengths),
    )


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("split", [((0,), (1,), (2,), (3,)), ((3, 0), (2, 1)), ((2, 3, 1, 0),)])
def test_sums_do_not_depend_on_the_split(name: str, split: tuple[tuple[int, ...], ...]) -> None:
    x = example()
    settings = replace(SETTINGS, correction=truncated_importance(0.0, 2.0), opsm_delta=0.01)
    whole = run(x, name, settings)
    pieces = [policy_objective(p, ALGORITHMS[name].form, settings, r) for p, r in (part(x, s) for s in split)]
    assert sum(p.loss.item() for p in pieces) == pytest.approx(whole.loss.item(), abs=1e-5)
    for key, value in whole.sums.items():
        assert sum(p.sums[key].item() for p in pieces) == pytest.approx(value.item(), abs=1e-5), key
    for key, value in whole.maxima.items():
        assert max(p.maxima[key].item() for p in pieces) == value.item()
    for key, value in whole.minima.items():
        assert min(p.minima[key].item() for p in pieces) == value.item()
    for key, value in whole.histograms.items():
        assert torch.equal(torch.stack([p.histograms[key] for p in pieces]).sum(0), value)
    (want,) = torch.autograd.grad(whole.loss, x.log_probs)
    (got,) = torch.autograd.grad(torch.stack([p.loss for p in pieces]).sum(), x.log_probs)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_poison_behind_the_mask_changes_nothing(name: str, poison: float) -> None:
    x = example()
    settings = replace(SETTINGS, correction=truncated_importance(0.0, 2.0), opsm_delta=0.01, unbiased_kl=True)
    clean = run(x, name, settings)
    (want,) = torch.autograd.grad(clean.loss, x.log_probs)
    hidden = x.mask == 0
    assert hidden.any()
    columns = ("log_probs", "entropy", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    bad = {c: torch.where(hidden, poison, getattr(x, c).detach()) for c in columns}
    bad["log_probs"].requires_grad_()
    dirty = run(replace(x, **bad), name, settings)
    (got,) = torch.autograd.grad(dirty.loss, bad["log_probs"])
    assert torch.equal(got, want)
    for kind in ("sums", "maxima", "minima"):
        got_kind, want_kind = getattr(dirty, kind), getattr(clean, kind)
        assert {k: v.item() for k, v in got_kind.items()} == {k: v.item() for k, v in want_kind.items()}
    assert all(torch.equal(v, clean.histograms[k]) for k, v in dirty.histograms.items())


@pytest.mark.parametrize("name", ["grpo", "cispo"])
def test_without_old_log_probs_the_current_ones_serve(name: str) -> None:
    x = replace(example(), old_log_probs=None)
    same = replace(x, old_log_probs=x.log_probs.detach())
    one, two = run(x, name), run(same, name)
    assert one.loss.item() == two.loss.item()
    assert one.sums["ppo_kl"].item() == 0
    assert torch.equal(*(torch.autograd.grad(o.loss, x.log_probs)[0] for o in (one, two)))


@pytest.mark.parametrize("scored", [True, False])
def test_with_the_engine_as_old_policy_the_trainer_is_still_compared_with_it(scored: bool) -> None:
    x = example()
    assert x.rollout_log_probs is not None
    old = x.old_log_probs if scored else None
    got = run(replace(x, old_log_probs=old, old_from_engine=True))
    trainer = x.log_probs.detach() if old is None else old
    difference = (trainer - x.rollout_log_probs).abs() * x.mask
    assert got.maxima["train_rollout_logprob_abs_diff_max"].item() == pytest.approx(difference.max().item())
    want = run(replace(x, old_log_probs=x.rollout_log_probs))
    assert got.loss.item() == want.loss.item()
    assert got.sums["ppo_kl"].item() == want.sums["ppo_kl"].item()


def test_rejected_tokens_leave_the_numerator_only() -> None:
    x = example()

    def reject(loss: Tensor, gap: EngineGap) -> Corrected:
        kept = gap.mask.clone()
        kept[:4] = 0
        return Corrected(loss=loss, mask=kept, metrics={"rejected": (kept != x.mask).float()})

    settings = replace(SETTINGS, entropy_coef=0.0, kl_loss_coef=None, correction=reject)
    got = run(x, "grpo", settings)
    rest = replace(x, advantages=torch.cat([torch.zeros(4), x.advantages[4:]]))
    want = run(rest, "grpo", replace(settings, correction=None))
    assert got.loss.item() == pytest.approx(want.loss.item(), abs=1e-6)
    assert got.sums["rejected"].item() == pytest.approx(x.mask[:4].sum().item() / mask_sums(x.mask)[0])
    assert got.sums["rejected_frac"].item() == pytest.approx(got.sums["rejected"].item())


def test_custom_reducer_serves_the_policy_term_only() -> None:
    x = example()
    reducer = TokenReducer.per_rollout(x.mask, mask_sums(x.mask), x.lengths)
    got = policy_objective(
        x, ALGORITHMS["grpo"].form, SETTINGS, reducer, lambda values, mask: (values * mask).sum() * 0
    )
    plain = run(x)
    assert got.sums["pg_loss"].item() == 0
    assert got.sums["kl_loss"].item() == plain.sums["kl_loss"].item()


def test_zero_kl_coefficient_still_measures() -> None:
    got = run(example(), settings=replace(SETTINGS, kl_loss_coef=0.0, entropy_coef=0.0))
    assert got.sums["kl_loss"].item() != 0
    assert got.loss.item() == pytest.approx(got.sums["pg_loss"].item())


def test_rows_of_the_table() -> None:
    group = {name for name, spec in ALGORITHMS.items() if spec.group_baseline}
    assert group == {"grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"}
    assert {n for n, s in ALGORITHMS.items() if s.leave_one_out} == {"rloo"}
    assert {n for n, s in ALGORITHMS.items() if s.group_std} == {"grpo", "gspo", "cispo"}
    assert {n for n, s in ALGORITHMS.items() if s.needs_critic} == {"ppo"}
    assert {n for n, s in ALGORITHMS.items() if s.needs_old_log_probs} == {"gspo"}
