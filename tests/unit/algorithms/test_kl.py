"""KL estimators against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from slime.algorithms.kl import KL_KINDS, approx_kl


def formula(kind: str, p: float, q: float, ratio: float | None) -> float:
    d = p - q
    value = {"k1": d, "k2": d * d / 2}.get(kind, math.exp(-d) - 1 + d)
    value *= 1 if ratio is None else ratio
    return min(max(value, -10.0), 10.0) if kind == "low_var_kl" else value


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("with_ratio", [False, True])
def test_estimators_equal_their_formulas(kind: str, with_ratio: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q, r = (torch.randn(50, generator=generator) * 3 for _ in range(3))
    ratio = r.exp() if with_ratio else None
    got = approx_kl(p, q, kind, ratio)
    want = [
        formula(kind, float(a), float(b), float(c) if with_ratio else None)
        for a, b, c in zip(p.double(), q.double(), r.exp().double(), strict=True)
    ]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_clamp_comes_after_the_ratio() -> None:
    p, q = torch.tensor([0.0]), torch.tensor([3.0])
    assert approx_kl(p, q, "low_var_kl").item() == 10.0
    assert approx_kl(p, q, "low_var_kl", torch.tensor([0.1])).item() == pytest.approx(0.1 * (math.e**3 - 4), rel=1e-5)


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_nearly_equal_policies_keep_their_digits(kind: str) -> None:
    p = torch.tensor([-2.0])
    q = p + 1e-3
    assert approx_kl(p, q, kind).item() == pytest.approx(1e-3**2 / 2, rel=1e-2)


def test_half_precision_is_lifted() -> None:
    p = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert approx_kl(p, p, "k3").dtype == torch.float32


def test_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="k1, k2, k3, low_var_kl"):
        approx_kl(torch.zeros(1), torch.zeros(1), "k4")
