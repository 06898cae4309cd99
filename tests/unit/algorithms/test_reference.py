"""Every objective against its slow float64 reference: values, gradients, metrics, any split, every kind of batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slime.algorithms import ALGORITHMS, shape_group_rewards
from slime.algorithms.advantages import AdvantageInputs
from slime.algorithms.corrections import EngineGap, Rejection, Weighting, engine_correction, weight_total
from slime.algorithms.kl import approx_kl
from slime.algorithms.losses import sft_loss, value_loss
from slime.algorithms.objective import ClipRange, Objective, ObjectiveSettings, PolicyInputs, policy_objective
from slime.algorithms.reduction import TokenReducer, blank_masked, whiten
from tests.support.objective_reference import Response, Spec, batches, mean_weight, reference, rollout_size

TIGHT = {"abs": 1e-10, "rel": 1e-10}

SPECS: dict[str, Spec] = {
    "grpo": Spec(),
    "grpo_no_std": Spec(std=False),
    "dr_grpo": Spec(std=False, reduction="64"),
    "dapo": Spec(high=0.28, reduction="token"),
    "gspo": Spec(estimator="gspo", low=3e-4, high=4e-4),
    "cispo": Spec(estimator="cispo", low=1.0, high=0.2),
    "rloo": Spec(estimator="rloo"),
    "rloo_kl": Spec(estimator="rloo", kl_coef=0.1),
    "reinforce_plus_plus": Spec(estimator="reinforce_plus_plus", kl_coef=0.1, gamma=0.9, whiten=True),
    "reinforce_plus_plus_baseline": Spec(estimator="reinforce_plus_plus_baseline", kl_coef=0.1, whiten=True),
    "ppo": Spec(estimator="ppo", kl_coef=0.1, gamma=0.9, lambd=0.8, whiten=True),
    "clip_higher": Spec(high=0.5),
    "dual_clip": Spec(dual=1.1),
    "token_level": Spec(reduction="token"),
    "constant_denominator": Spec(reduction="32"),
    "entropy": Spec(entropy_coef=0.05),
    "kl_k1": Spec(kl_loss_coef=0.1, kl="k1"),
    "kl_k2": Spec(kl_loss_coef=0.1, kl="k2"),
    "kl_k3": Spec(kl_loss_coef=0.1, kl="k3"),
    "kl_low_var": Spec(kl_loss_coef=0.1, kl="low_var_kl"),
    "kl_unbiased": Spec(kl_loss_coef=0.1, kl="k3", unbiased=True),
    "opsm": Spec(opsm=0.01),
    "first_update": Spec(old="current"),
    "rollout_logprobs": Spec(old="engine"),
    "rollout_logprobs_rs": Spec(old="engine", reject=("token", 0.7, 1.4, None)),
    "tis_truncate": Spec(weight=("token", "clip", 0.0, 1.2)),
    "tis_clip": Spec(weight=("token", "clip", 0.8, 1.2)),
    "tis_mask": Spec(weight=("token", "mask", 0.7, 1.3), entropy_coef=0.05),
    "tis_sequence": Spec(weight=("sequence", "clip", 0.0, 1.5)),
    "tis_sequence_mask": Spec(weight=("sequence", "mask", 0.5, 2.0)),
    "tis_geometric": Spec(weight=("geometric", "clip", 0.9, 1.1)),
    "tis_geometric_mask": Spec(weight=("geometric", "mask", 0.8, 1.2)),
    "tis_normalised": Spec(weight=("token", "clip", 0.0, 1.2), normalise=True),
    "tis_sequence_normalised": Spec(weight=("sequence", "mask", 0.5, 2.0), normalise=True),
    "icepop": Spec(weight=("token", "zero", 0.8, 1.2), entropy_coef=0.05, kl_loss_coef=0.1),
    "rs_token": Spec(reject=("token", 0.7, 1.4, None), entropy_coef=0.05),
    "rs_sequence": Spec(reject=("sequence", 0.5, 2.0, None)),
    "rs_geometric": Spec(reject=("geometric", 0.9, 1.1, None)),
    "rs_veto": Spec(reject=("token", 0.0, 9.0, 0.6)),
    "tis_and_rs": Spec(weight=("token", "clip", 0.0, 1.3), reject=("geometric", 0.8, 1.3, 0.5), normalise=True),
    "gspo_tis": Spec(estimator="gspo", weight=("sequence", "clip", 0.0, 1.5)),
    "cispo_first_update": Spec(estimator="cispo", old="current", low=1.0),
}


def flat(batch: Sequence[Response], column: str) -> Tensor:
    rows = [torch.tensor([float(x) for x in getattr(s, column)], dtype=torch.float64) for s in batch]
    return torch.cat(rows)


def product_advantages(batch: Sequence[Response], spec: Spec) -> list[Tensor]:
    """As batching and the trainer make them."""
    row = ALGORITHMS[spec.estimator]
    rewards = [s.reward for s in batch]
    if row.group_baseline:
        rewards = shape_group_rewards(
            rewards,
            [s.group for s in batch],
            [s.rollout for s in batch],
            normalize_std=row.group_std and spec.std,
            leave_one_out=row.leave_one_out,
        )
    masks = [torch.tensor(s.mask, dtype=torch.float64) for s in batch]
    lengths = [len(s.mask) for s in batch]
    kl = approx_kl(flat(batch, "old"), flat(batch, "ref"), "k1") if spec.kl_coef else torch.zeros(sum(lengths))
    kl = blank_masked(kl.double(), torch.cat(masks))
    found = row.estimate(
        AdvantageInputs(
            rewards=rewards,
            kl=list(kl.split(lengths)),
            masks=masks,
            values=list(flat(batch, "values").split(lengths)),
            kl_coef=spec.kl_coef,
            gamma=spec.gamma,
            lambd=spec.lambd,
        )
    )
    return whiten(found.advantages, masks) if spec.whiten else found.advantages


def settings_of(spec: Spec, normaliser: float) -> ObjectiveSettings:
    weighting, rejection = parts(spec)
    correction = None
    if weighting is not None or rejection is not None:
        correction = engine_correction(weighting, rejection, normaliser=normaliser)
    return ObjectiveSettings(
        clip=ClipRange(low=spec.low, high=spec.high, dual=spec.dual),
        entropy_coef=spec.entropy_coef,
        kl_loss_coef=spec.kl_loss_coef,
        kl_kind=spec.kl,
        unbiased_kl=spec.unbiased,
        opsm_delta=spec.opsm,
        correction=correction,
    )


def parts(spec: Spec) -> tuple[Weighting | None, Rejection | None]:
    weighting = rejection = None
    if spec.weight is not None:
        level, mode, low, high = spec.weight
        weighting = Weighting(level=level, mode=mode, low=low, high=high)  # type: ignore[arg-type]
    if spec.reject is not None:
        level, low, high, veto = spec.reject
        rejection = Rejection(level=level, low=low, high=high, veto=veto)  # type: ignore[arg-type]
    return weighting, rejection


def product(
    batch: Sequence[Response], spec: Spec, advantages: Sequence[Tensor], chosen: Sequence[int]
) -> tuple[Objective, list[Tensor]]:
    """The objective of the micro-batch of the ``chosen`` samples, and its log-probs."""
    some = [batch[i] for i in chosen]
    leaves = [torch.tensor([float(x) for x in s.log_probs], dtype=torch.float64, requires_grad=True) for s in some]
    mask, lengths = flat(some, "mask"), [len(s.mask) for s in some]
    mean = TokenReducer.per_rollout(mask, [rollout_size(batch, s) for s in some], lengths)
    reducer = mean
    if spec.reduction == "token":
        reducer = mean = TokenReducer.per_token(mask)
    elif spec.reduction != "rollout":
        reducer = TokenReducer.constant(mask, float(spec.reduction))
    inputs = PolicyInputs(
        log_probs=torch.cat(leaves),
        advantages=torch.cat([advantages[i] for i in chosen]),
        mask=mask,
        lengths=lengths,
        entropy=flat(some, "entropy"),
        old_log_probs=None if spec.old == "current" else flat(some, "old"),
        rollout_log_probs=flat(some, "engine"),
        ref_log_probs=flat(some, "ref"),
        old_from_engine=spec.old == "engine",
    )
    settings = settings_of(spec, normaliser(batch, spec))
    form = ALGORITHMS[spec.estimator].form
    return policy_objective(inputs, form, settings, reducer, metric_reducer=mean), leaves


def normaliser(batch: Sequence[Response], spec: Spec) -> float:
    """The mean weight, summed sample by sample as ranks do."""
    if not spec.normalise:
        return 1.0
    weighting, rejection = parts(spec)
    assert weighting is not None
    total = torch.zeros(2, dtype=torch.float64)
    for s in batch:
        mask = flat([s], "mask")
        trainer, engine = (blank_masked(flat([s], name), mask) for name in ("old", "engine"))
        gap = EngineGap(trainer=trainer, engine=engine, mask=mask, lengths=[len(s.mask)])
        total += weight_total(gap, weighting, rejection)
    return float(total[0] / total[1]) if total[1] else 1.0


def splits(n: int) -> list[list[list[int]]]:
    """All at once; one by one; two uneven parts in another order."""
    return [[list(range(n))], [[i] for i in range(n)], [list(range(n))[::-2], list(range(n - 1))[::-2]]]


@pytest.mark.parametrize("name", SPECS)
def test_objective(name: str) -> None:
    spec = SPECS[name]
    for kind, batch in batches().items():
        want = reference(batch, spec)
        tokens = [p for s in batch for p in s.log_probs]
        total = want.pop("loss")
        slopes = (
            torch.autograd.grad(total, tokens, allow_unused=True) if isinstance(total, Tensor) else [None] * len(tokens)
        )
        slope = [0.0 if g is None else float(g) for g in slopes]
        advantages = product_advantages(batch, spec)
        for split in splits(len(batch)):
            results = [product(batch, spec, advantages, chosen) for chosen in split if chosen]
            got = sum(o.loss.item() for o, _ in results)
            assert got == pytest.approx(float(total), **TIGHT), kind
            for metric, value in want.items():
                assert sum(o.sums[metric].item() for o, _ in results) == pytest.approx(value, **TIGHT), (kind, metric)
            gradients: dict[int, list[float]] = {}
            for (objective, leaves), chosen in zip(results, [c for c in split if c], strict=True):
                found = torch.autograd.grad(objective.loss, leaves)
                gradients |= {i: g.tolist() for i, g in zip(chosen, found, strict=True)}
            assert [g for i in sorted(gradients) for g in gradients[i]] == pytest.approx(slope, **TIGHT), kind


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.normalise])
def test_normaliser_is_the_mean_weight(name: str) -> None:
    for kind, batch in batches().items():
        assert normaliser(batch, SPECS[name]) == pytest.approx(mean_weight(batch, SPECS[name]), **TIGHT), kind


def test_value_loss() -> None:
    """https://arxiv.org/abs/1707.06347 with the clipped value of https://arxiv.org/abs/2005.12729."""
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(60, generator=generator, dtype=torch.float64) for _ in range(3))
    leaf = values.clone().requires_grad_()
    loss, clipped = value_loss(leaf, old, returns, 0.2)
    (slope,) = torch.autograd.grad(loss.sum(), leaf)
    for i in range(60):
        v, o, r = float(values[i]), float(old[i]), float(returns[i])
        near = o + min(max(v - o, -0.2), 0.2)
        free, held = (v - r) ** 2, (near - r) ** 2
        assert loss[i].item() == pytest.approx(max(free, held), **TIGHT)
        assert clipped[i].item() == float(held > free)
        want = 2 * (v - r) if free >= held else (2 * (near - r) if abs(v - o) < 0.2 else 0.0)
        assert slope[i].item() == pytest.approx(want, **TIGHT)


def test_sft_loss() -> None:
    for kind, batch in batches().items():
        leaf = flat(batch, "log_probs").requires_grad_()
        mask, lengths = flat(batch, "mask"), [len(s.mask) for s in batch]
        reducer = TokenReducer.per_rollout(mask, [rollout_size(batch, s) for s in batch], lengths)
        loss = reducer(sft_loss(blank_masked(leaf, mask)))
        want = sum(-float(s.log_probs[t]) / rollout_size(batch, s) for s in batch for t in s.trained)
        assert loss.item() == pytest.approx(want, **TIGHT), kind
        (slope,) = torch.autograd.grad(loss, leaf)
        weights = [-m / rollout_size(batch, s) for s in batch for m in s.mask]
        assert slope.tolist() == pytest.approx(weights, **TIGHT), kind


def test_measuring_changes_nothing_and_gives_perplexities() -> None:
    batch = batches()["ragged_groups"]
    mask, lengths = flat(batch, "mask"), [len(s.mask) for s in batch]
    gap = EngineGap(trainer=flat(batch, "old"), engine=flat(batch, "engine"), mask=mask, lengths=lengths)
    loss = torch.randn(sum(lengths), dtype=torch.float64)
    measured = engine_correction(Weighting(low=0.5, high=1.1), measure=True)(loss, gap)
    assert measured.loss is loss
    assert measured.mask is None
    start = 0
    for s in batch:
        log_ppl = {c: statistics.fmean(-float(getattr(s, c)[t]) for t in s.trained) for c in ("old", "engine")}
        want = {
            "train_ppl": math.exp(log_ppl["old"]),
            "rollout_ppl": math.exp(log_ppl["engine"]),
            "log_ppl_diff": log_ppl["old"] - log_ppl["engine"],
        }
        for metric, value in want.items():
            assert measured.metrics[metric][start : start + len(s.mask)].tolist() == pytest.approx(
                [value] * len(s.mask)
            )
        start += len(s.mask)
