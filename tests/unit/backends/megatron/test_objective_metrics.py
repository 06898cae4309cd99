"""The reduction of a step's metrics over micro-batches of one rank."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from slime.algorithms.monitors import RELATIVE_RESOLUTION, log_histogram
from slime.algorithms.objective import Objective
from slime.backends.megatron import cpu

cpu.install()

from slime.backends.megatron.objective_metrics import reduce_objectives  # noqa: E402
from slime.backends.megatron.parallel import ParallelState  # noqa: E402


class OneRank:
    is_pp_last = True
    pp_size = dp_size = 1
    device = torch.device("cpu")


ALONE = cast(ParallelState, cast(Any, OneRank()))


def part(value: float, low: float, high: float, differences: list[float]) -> Objective:
    x = torch.tensor(differences)
    return Objective(
        loss=torch.tensor(value),
        sums={"loss": torch.tensor(value)},
        maxima={"ratio_max": torch.tensor(high)},
        minima={"ratio_min": torch.tensor(low)},
        histograms={"diff": log_histogram(x, torch.ones_like(x))},
    )


def test_sums_are_divided_once_and_extremes_and_quantiles_are_global() -> None:
    parts = [part(3.0, 0.5, 1.5, [0.01] * 97), part(5.0, 0.7, 4.0, [2.0, 3.0, 4.0])]
    got = reduce_objectives(parts, 4, ALONE)
    assert (got["loss"], got["ratio_min"], got["ratio_max"]) == (2.0, 0.5, 4.0)
    assert got["diff_p99"] == pytest.approx(3.0, rel=RELATIVE_RESOLUTION)


def test_what_no_token_took_part_in_is_left_out_and_a_real_infinity_is_not() -> None:
    got = reduce_objectives([part(0.0, math.inf, -math.inf, [])], 1, ALONE)
    assert set(got) == {"loss"}
    assert reduce_objectives([part(0.0, 1.0, math.inf, [1.0])], 1, ALONE)["ratio_max"] == math.inf
