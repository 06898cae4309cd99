"""The policy objective written out slowly: float64 scalars, sample by sample, token by token.

Independent of ``slime.algorithms``: it shares no code with it and reads the papers' formulas from left
to right. Masked tokens are never looked at. ``stop(x)`` is a stop-gradient; gradients come from autograd over
single numbers. Also holds the batches that every formula must pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Row = list[Any]  # one number or scalar tensor per response token


@dataclass(kw_only=True)
class Response:
    """One sample; ``rollout`` is the trajectory it is a segment of."""

    group: int
    rollout: int
    reward: float
    mask: list[int]
    log_probs: Row = field(default_factory=list)
    old: Row = field(default_factory=list)
    engine: Row = field(default_factory=list)
    ref: Row = field(default_factory=list)
    entropy: Row = field(default_factory=list)
    values: Row = field(default_factory=list)

    @property
    def trained(self) -> list[int]:
        return [t for t, m in enumerate(self.mask) if m]


@dataclass(kw_only=True)
class Spec:
    """What is computed; names as in the papers."""

    estimator: str = "grpo"
    std: bool = True
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0
    whiten: bool = False
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    entropy_coef: float = 0.0
    kl_loss_coef: float | None = None
    kl: str = "k1"
    unbiased: bool = False
    opsm: float | None = None
    weight: tuple[str, str, float, float] | None = None  # level, mode, low, high
    normalise: bool = False
    reject: tuple[str, float, float, float | None] | None = None  # level, low, high, veto
    reduction: str = "rollout"  # rollout, token, or a number: the constant of Dr. GRPO
    old: str = "trainer"  # trainer, current, engine


def stop(x: Any) -> float:
    return float(x.detach()) if isinstance(x, Tensor) else float(x)


def exp(x: Any) -> Any:
    return x.exp() if isinstance(x, Tensor) else math.exp(x)


# Rewards


def shaped_rewards(batch: Sequence[Response], spec: Spec) -> list[float]:
    """GRPO https://arxiv.org/abs/2402.03300, Dr. GRPO https://arxiv.org/abs/2503.20783 (no std),
    RLOO https://arxiv.org/abs/2402.14740."""
    if spec.estimator in ("reinforce_plus_plus", "ppo"):
        return [s.reward for s in batch]
    reward_of = {r: statistics.fmean(s.reward for s in batch if s.rollout == r) for r in {s.rollout for s in batch}}
    out = []
    for s in batch:
        members = sorted({other.rollout for other in batch if other.group == s.group})
        rewards = [reward_of[r] for r in members]
        if spec.estimator == "rloo":
            others = [reward_of[r] for r in members if r != s.rollout]
            value = reward_of[s.rollout] - statistics.fmean(others) if others else 0.0
        else:
            value = reward_of[s.rollout] - statistics.fmean(rewards)
            if spec.std and spec.estimator in ("grpo", "gspo", "cispo") and len(rewards) > 1:
                value /= statistics.stdev(rewards) + 1e-6
        out.append(0.0 if len(set(rewards)) == 1 else value)
    return out


# Advantages


def advantages(batch: Sequence[Response], spec: Spec) -> list[list[float]]:
    """One number per response token; at masked tokens it does not matter.

    REINFORCE++ https://arxiv.org/abs/2501.03262, GAE https://arxiv.org/abs/1506.02438.
    """
    rows = []
    for s, reward in zip(batch, shaped_rewards(batch, spec), strict=True):
        n = len(s.mask)
        kl = [stop(s.old[t]) - stop(s.ref[t]) if spec.kl_coef and s.mask[t] else 0.0 for t in range(n)]
        if spec.estimator == "rloo":
            row = [reward - spec.kl_coef * sum(kl[t:]) for t in range(n)]
        elif spec.estimator == "reinforce_plus_plus":
            token_rewards = [-spec.kl_coef * k for k in kl]
            if s.trained:
                token_rewards[s.trained[-1]] += reward
            row = [sum(spec.gamma ** (j - t) * token_rewards[j] for j in range(t, n)) for t in range(n)]
        elif spec.estimator == "reinforce_plus_plus_baseline":
            row = [reward - spec.kl_coef * kl[t] for t in range(n)]
        elif spec.estimator == "ppo":
            row = gae([-spec.kl_coef * k for k in kl], reward, [float(v) for v in s.values], spec)
        else:
            row = [reward] * n
        rows.append(row)
    return whitened(batch, rows) if spec.whiten else rows


def gae(token_rewards: list[float], reward: float, values: list[float], spec: Spec) -> list[float]:
    n = len(values)
    token_rewards = [r + (reward if t == n - 1 else 0.0) for t, r in enumerate(token_rewards)]
    deltas = [token_rewards[t] + spec.gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((spec.gamma * spec.lambd) ** (j - t) * deltas[j] for j in range(t, n)) for t in range(n)]


def whitened(batch: Sequence[Response], rows: list[list[float]]) -> list[list[float]]:
    chosen = [row[t] for s, row in zip(batch, rows, strict=True) for t in s.trained]
    mean = statistics.fmean(chosen)
    variance = statistics.variance(chosen) if len(chosen) > 1 else 0.0
    return [[(a - mean) / math.sqrt(variance + 1e-8) for a in row] for row in rows]


# Corrections between engine and trainer


def trainer_row(s: Response, spec: Spec) -> list[float]:
    """The trainer's log-probs before the update."""
    return [stop(p) if m else 0.0 for p, m in zip(s.log_probs if spec.old == "current" else s.old, s.mask, strict=True)]


def ratio_of(s: Response, level: str, spec: Spec) -> list[float]:
    """trainer / engine per token; https://richardli.xyz/rl-collapse for the sequence levels."""
    trainer = trainer_row(s, spec)
    differences = {t: trainer[t] - float(s.engine[t]) for t in s.trained}
    out = []
    for t in range(len(s.mask)):
        if level == "token":
            d = differences.get(t, 0.0)
        else:
            d = sum(differences.values()) / (max(len(differences), 1) if level == "geometric" else 1)
        out.append(math.exp(min(max(d, -20.0), 20.0)))
    return out


def correct(s: Response, spec: Spec) -> tuple[list[float], list[int]]:
    """Weight and kept mask of every token: TIS https://fengyao.notion.site/off-policy-rl,
    IcePop https://arxiv.org/abs/2510.18855 (mode zero), masks and veto https://richardli.xyz/rl-collapse."""
    weights, kept = [1.0] * len(s.mask), list(s.mask)
    if spec.weight is not None:
        level, mode, low, high = spec.weight
        for t, w in enumerate(ratio_of(s, level, spec)):
            if mode == "clip":
                weights[t] = min(max(w, low), high)
            elif mode == "zero":
                weights[t] = w if low <= w <= high else 0.0
            else:
                weights[t] = w
                kept[t] = kept[t] if low <= w <= high else 0
    if spec.reject is not None:
        level, low, high, veto = spec.reject
        for t, w in enumerate(ratio_of(s, level, spec)):
            kept[t] = kept[t] if low <= w <= high else 0
        tokens = ratio_of(s, "token", spec)
        if veto is not None and any(tokens[t] < veto for t in s.trained):
            kept = [0] * len(kept)
    return weights, kept


def mean_weight(batch: Sequence[Response], spec: Spec) -> float:
    """Over kept tokens, or over sequences that have any."""
    assert spec.weight is not None
    found: list[float] = []
    for s in batch:
        weights, kept = correct(s, spec)
        chosen = [w for w, k in zip(weights, kept, strict=True) if k]
        found += chosen if spec.weight[0] == "token" else chosen[:1]
    return statistics.fmean(found) if found else 1.0


# Token losses


def kl_value(p: Any, q: float, kind: str, factor: Any) -> Any:
    """http://joschu.net/blog/kl-approx.html"""
    d = p - q
    value = {"k1": d, "k2": d * d / 2}.get(kind, exp(-d) - 1 + d) * factor
    if kind == "low_var_kl" and not -10 <= stop(value) <= 10:
        return min(max(stop(value), -10.0), 10.0)
    return value


def policy_loss(p: Any, ratio: Any, advantage: float, spec: Spec) -> tuple[Any, float]:
    """PPO https://arxiv.org/abs/1707.06347 with DAPO's two bounds https://arxiv.org/abs/2503.14476, dual clip
    https://arxiv.org/abs/1912.09729, CISPO https://arxiv.org/abs/2506.13585."""
    bounded = min(max(stop(ratio), 1 - spec.low), 1 + spec.high)
    if spec.estimator == "cispo":
        return -bounded * advantage * p, float(bounded != stop(ratio))
    free, clipped = -ratio * advantage, -bounded * advantage
    is_clipped = clipped > stop(free)
    value = clipped if is_clipped else free
    if spec.dual is not None and advantage < 0 and -spec.dual * advantage < stop(value):
        value = -spec.dual * advantage
    return value, float(is_clipped)


# The whole


def reference(batch: Sequence[Response], spec: Spec) -> dict[str, Any]:
    """Sums of loss and metrics over the batch, before the division by rollouts or tokens."""
    sums: dict[str, Any] = dict.fromkeys(("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "rejected_frac"), 0.0)
    norm = mean_weight(batch, spec) if spec.normalise else 1.0
    for s, advantage in zip(batch, advantages(batch, spec), strict=True):
        trainer = trainer_row(s, spec)
        old = (
            [float(e) if m else 0.0 for e, m in zip(s.engine, s.mask, strict=True)] if spec.old == "engine" else trainer
        )
        drift = {t: old[t] - s.log_probs[t] for t in s.trained}
        mean_drift = sum(drift.values()) / max(len(drift), 1)
        weights, kept = correct(s, spec)
        for t in s.trained:
            kl = mean_drift if spec.estimator == "gspo" else drift[t]  # https://arxiv.org/abs/2507.18071
            pg, clipped = policy_loss(s.log_probs[t], exp(-kl), advantage[t], spec)
            if spec.opsm is not None and advantage[t] < 0 and stop(mean_drift) > spec.opsm:
                pg = 0.0
            pg = pg * weights[t] / norm
            share = 1 / token_weight(batch, s, spec)
            mean = share if spec.reduction in ("rollout", "token") else 1 / rollout_size(batch, s)
            total = pg - spec.entropy_coef * float(s.entropy[t])
            if spec.kl_loss_coef is not None:
                factor = exp(-drift[t]) if spec.unbiased else 1.0
                total = total + spec.kl_loss_coef * kl_value(s.log_probs[t], float(s.ref[t]), spec.kl, factor)
            zeroed = spec.weight is not None and spec.weight[1] == "zero" and weights[t] == 0
            sums["pg_loss"] += kept[t] * share * stop(pg)
            sums["loss"] = sums["loss"] + kept[t] * share * total
            sums["pg_clipfrac"] += mean * clipped
            sums["ppo_kl"] += mean * stop(kl)
            sums["rejected_frac"] += mean * float(not kept[t] or zeroed)
    return sums


def rollout_size(batch: Sequence[Response], s: Response) -> int:
    """Trained tokens of the whole trajectory."""
    return max(sum(len(other.trained) for other in batch if other.rollout == s.rollout), 1)


def token_weight(batch: Sequence[Response], s: Response, spec: Spec) -> float:
    """What a token's loss is divided by: its rollout's tokens, 1 (DAPO), or a constant (Dr. GRPO)."""
    if spec.reduction == "rollout":
        return rollout_size(batch, s)
    return 1.0 if spec.reduction == "token" else float(spec.reduction)


# Batches


def make_batch(
    layout: Sequence[tuple[int, int, float, Sequence[int]]], *, seed: int, poison: bool = False
) -> list[Response]:
    """Random numbers for ``(group, rollout, reward, mask)`` rows.

    With ``poison`` every masked entry of every column is infinite or not a number.
    """
    generator = torch.Generator().manual_seed(seed)

    def row(n: int, spread: float, mean: float) -> Row:
        return (torch.randn(n, generator=generator, dtype=torch.float64) * spread + mean).tolist()

    batch = []
    for group, rollout, reward, mask in layout:
        n = len(mask)
        base = row(n, 0.5, -2.0)
        columns = {
            name: [b + d for b, d in zip(base, row(n, 0.4, 0.0), strict=True)]
            for name in ("log_probs", "old", "engine", "ref")
        }
        columns |= {"entropy": row(n, 0.2, 1.0), "values": row(n, 0.5, 0.3)}
        if poison:
            bad = [math.inf, -math.inf, math.nan]
            names = [name for name in columns if name != "values"]
            for name in names:
                columns[name] = [
                    x if m else bad[t % 3] for t, (x, m) in enumerate(zip(columns[name], mask, strict=True))
                ]
        columns["log_probs"] = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in columns["log_probs"]]
        batch.append(Response(group=group, rollout=rollout, reward=reward, mask=list(mask), **columns))
    return batch


_A, _B, _C, _D = [1, 1, 0, 1], [1, 0], [0, 1, 1, 1, 0], [1, 1, 1]

LAYOUTS: dict[str, list[tuple[int, int, float, Sequence[int]]]] = {
    "ragged_groups": [(0, 0, 1.0, _A), (0, 1, 0.0, _B), (0, 2, 0.5, _C), (1, 3, 1.0, _D), (1, 4, 0.0, _A)],
    "filtered_groups": [(5, 50, 0.2, _A), (5, 53, 0.9, _C), (9, 90, 1.0, _D), (7, 71, 0.0, _B), (7, 70, 0.4, _D)],
    "fanned_out": [
        (0, 0, 1.0, _A),
        (0, 0, 1.0, _B),
        (0, 1, 0.0, _C),
        (1, 2, 0.3, _D),
        (1, 3, 0.9, _A),
        (1, 3, 0.9, _D),
    ],
    "fully_masked_sample": [
        (0, 0, 1.0, _A),
        (0, 1, 0.0, [0, 0, 0]),
        (0, 2, 0.4, _C),
        (1, 3, 0.0, [0]),
        (1, 4, 1.0, _B),
    ],
    "one_token_responses": [(0, 0, 1.0, [1]), (0, 1, 0.0, [1]), (1, 2, 0.5, [1]), (1, 3, 0.7, _A)],
    "identical_rewards": [(0, 0, 0.1, _A), (0, 1, 0.1, _B), (0, 2, 0.1, _C), (1, 3, 1.0, _D), (1, 4, 1.0, _A)],
    "groups_of_one": [(0, 0, 1.0, _A), (1, 1, 0.0, _C)],
    "poison_behind_the_mask": [(0, 0, 1.0, _A), (0, 1, 0.0, _C), (1, 2, 0.5, _B), (1, 3, 0.7, [0, 0, 0])],
}
"""Every batch that a formula must pass; masked tokens of the last are infinite or not a number."""


def batches() -> dict[str, list[Response]]:
    """Fresh copies of all batches."""
    return {
        name: make_batch(layout, seed=i, poison=name == "poison_behind_the_mask")
        for i, (name, layout) in enumerate(LAYOUTS.items())
    }
