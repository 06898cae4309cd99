"""Flags to weights and rejection, and what a user's function gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slime.algorithms.corrections import EngineGap, Rejection, Weighting
from slime.backends.megatron import cpu

cpu.install()

from slime.backends.megatron.batches import MicroBatch  # noqa: E402
from slime.backends.megatron.engine_correction import (  # noqa: E402
    correction_for,
    rejection_of,
    weight_normaliser,
    weighting_of,
)
from slime.backends.megatron.hooks import TrainHooks  # noqa: E402
from slime.backends.megatron.parallel import ParallelState  # noqa: E402
from slime.backends.megatron.rollout_columns import RolloutColumns  # noqa: E402
from slime.config import ArgsView, Config  # noqa: E402
from slime.config.sections import AlgorithmConfig  # noqa: E402
from slime.errors import DataError  # noqa: E402

ALONE = cast(ParallelState, cast(Any, SimpleNamespace(is_pp_last=True, dp_size=1, device=torch.device("cpu"))))
ROW = cast(MicroBatch, cast(Any, SimpleNamespace(response_lengths=(2, 1), total_lengths=(5, 4))))


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ({}, Weighting(low=0.0, high=2.0)),
        ({"tis_clip": 3.0, "tis_clip_low": 0.1}, Weighting(low=0.1, high=3.0)),
        ({"tis_upper_bound": 4.0, "tis_lower_bound": 0.5}, Weighting(low=0.0, high=4.0)),
        ({"tis_mode": "clip"}, Weighting(low=0.5, high=2.0)),
        ({"tis_mode": "mask", "tis_level": "sequence"}, Weighting(low=0.5, high=2.0, level="sequence", mode="mask")),
        ({"use_icepop": True, "tis_clip_low": 0.5, "tis_clip": 5.0}, Weighting(low=0.5, high=5.0, mode="zero")),
    ],
)
def test_weights_of_the_flags(flags: dict[str, Any], want: Weighting) -> None:
    assert weighting_of(AlgorithmConfig(**flags)) == want


def test_rejection_of_the_flags() -> None:
    assert rejection_of(AlgorithmConfig(rs_veto_threshold=0.1)) is None
    got = rejection_of(AlgorithmConfig(use_rs=True, rs_level="geometric", rs_upper_bound=1.1, rs_veto_threshold=0.1))
    assert got == Rejection(level="geometric", low=0.5, high=1.1, veto=0.1)


def correct(algorithm: AlgorithmConfig, tis: Any = None, normaliser: float = 1.0) -> Any:
    hooks = TrainHooks(args=ArgsView(Config()), tis=tis)
    correction = correction_for(algorithm, hooks, ROW, torch.ones(3), normaliser)
    if correction is None:
        return None
    gap = EngineGap(trainer=torch.tensor([0.0, -1, -1]), engine=torch.zeros(3), mask=torch.ones(3), lengths=(2, 1))
    return correction(torch.ones(3), gap)


def test_which_flag_does_what() -> None:
    assert correct(AlgorithmConfig()) is None
    assert correct(AlgorithmConfig(use_tis=True), normaliser=2.0).loss.tolist() == pytest.approx(
        [0.5, 0.184, 0.184], abs=1e-3
    )
    measured = correct(AlgorithmConfig(get_mismatch_metrics=True))
    assert measured.loss.tolist() == [1, 1, 1]
    assert measured.mask is None
    assert {"tis", "train_ppl"} <= measured.metrics.keys()
    rejected = correct(AlgorithmConfig(use_rs=True))
    assert rejected.loss.tolist() == [1, 1, 1]
    assert rejected.mask.tolist() == [1, 0, 0]


def test_a_function_gets_the_normaliser_only_if_it_wants_it() -> None:
    seen: list[dict[str, Any]] = []

    def established(args: Any, *, pg_loss: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return pg_loss * 3, None, {}

    def knowing(args: Any, *, pg_loss: Any, weight_normaliser: float, **kwargs: Any) -> Any:
        return pg_loss * weight_normaliser, None, {}

    assert correct(AlgorithmConfig(use_tis=True), established, normaliser=5.0).loss.tolist() == [3, 3, 3]
    assert seen[0].keys() == {
        *("train_log_probs", "rollout_log_probs", "loss_masks"),
        *("total_lengths", "response_lengths"),
    }
    assert correct(AlgorithmConfig(get_mismatch_metrics=True), knowing, normaliser=5.0).loss.tolist() == [5, 5, 5]
    assert correct(AlgorithmConfig(), knowing) is None


def columns() -> RolloutColumns:
    trainer = {0: torch.tensor([0.0, -1.0]), 1: torch.tensor([1.0, float("nan")])}
    masks = {0: torch.ones(2), 1: torch.tensor([1.0, 0.0])}
    return RolloutColumns(masks=masks, old_log_probs=trainer, rollout_log_probs={i: m * 0 for i, m in masks.items()})


def test_normaliser() -> None:
    flags = AlgorithmConfig(use_tis=True, tis_batch_normalize=True)
    want = (1 + torch.tensor(-1.0).exp().item() + 2) / 3
    assert weight_normaliser(flags, columns(), [0, 1], ALONE) == pytest.approx(want)
    sequences = AlgorithmConfig(use_tis=True, tis_batch_normalize=True, tis_level="sequence")
    assert weight_normaliser(sequences, columns(), [0, 1], ALONE) == pytest.approx((want * 3 - 1) / 2)
    assert weight_normaliser(AlgorithmConfig(use_tis=True), columns(), [0, 1], ALONE) == 1.0
    assert weight_normaliser(flags, columns(), [], ALONE) == 1.0


@pytest.mark.parametrize("loss", ["sft_loss", "custom_loss"])
def test_no_other_loss_is_normalised_or_needs_log_probs_for_it(loss: Any) -> None:
    flags = AlgorithmConfig(use_tis=True, tis_batch_normalize=True, loss_type=loss)
    assert weight_normaliser(flags, RolloutColumns(masks={0: torch.ones(2)}), [0], ALONE) == 1.0


def test_normaliser_without_engine_log_probs_says_so() -> None:
    bare = RolloutColumns(masks={0: torch.ones(2)})
    with pytest.raises(DataError, match="carry no rollout_log_probs"):
        weight_normaliser(AlgorithmConfig(use_tis=True, tis_batch_normalize=True), bare, [0], ALONE)
