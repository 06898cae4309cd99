"""Importance weights and rejection between engine and trainer, as ``--custom-tis-function-path``.

    --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp
    --custom-config-path examples/train_infer_mismatch_helper/mis.yaml

The settings are flags of slime now (``--tis-level``, ``--use-rs`` ...; see docs/algorithms.md), and the
same functions serve both ways. This module keeps the established import path and metric names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron import cpu

cpu.install()  # before anything imports Megatron

from slime.algorithms.corrections import EngineGap, Rejection, Weighting, Weights, engine_weights, perplexities  # noqa: E402
from slime.algorithms.kl import approx_kl  # noqa: E402
from slime.algorithms.reduction import blank_masked, spread  # noqa: E402
from slime.backends.megatron.engine_correction import rejection_of, weighting_of  # noqa: E402
from slime.config.sections import AlgorithmConfig  # noqa: E402

SETTINGS = tuple(f.name for f in fields(AlgorithmConfig) if f.name.startswith(("tis_", "rs_", "use_tis", "use_rs")))
"""What is read of ``args``."""


def compute_mis_weights_with_cp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    weight_normaliser: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, list[Tensor]]]:
    """Multiply the policy loss by the weights; samples are whole, whatever the context-parallel size.

    Args:
        args: Flat argument view.
        pg_loss: ``[R]``.
        train_log_probs: N x ``[R_i]``.
        rollout_log_probs: N x ``[R_i]``.
        loss_masks: N x ``[R_i]``.
        total_lengths: N prompt plus response lengths.
        response_lengths: N values of R_i.
        weight_normaliser: Mean weight of the rollout, for ``tis_batch_normalize``.
        **kwargs: Ignored.
    """
    weights, masks, metrics = compute_mis_weights(
        args,
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        loss_masks=loss_masks,
        weight_normaliser=weight_normaliser,
    )
    return pg_loss if weights is None else pg_loss * torch.cat(weights), masks, metrics


def compute_mis_weights(
    args: Any,
    *,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    weight_normaliser: float = 1.0,
) -> tuple[list[Tensor] | None, list[Tensor], dict[str, list[Tensor]]]:
    """Weights (None without ``use_tis``: only metrics), masks after rejection, and per-token metrics."""
    settings = AlgorithmConfig(**{name: getattr(args, name) for name in SETTINGS if hasattr(args, name)})
    lengths = [len(mask) for mask in loss_masks]
    mask = torch.cat(list(loss_masks)).float()
    gap = EngineGap(
        trainer=blank_masked(torch.cat(list(train_log_probs)).detach(), mask),
        engine=blank_masked(torch.cat(list(rollout_log_probs)), mask),
        mask=mask,
        lengths=lengths,
    )
    metrics = perplexities(gap)
    metrics |= {"kl": gap.engine - gap.trainer, "k3_kl": approx_kl(gap.engine, gap.trainer, "k3")}
    if not settings.use_tis:
        return None, list(loss_masks), _split(metrics, lengths)
    weighting, rejection = weighting_of(settings), rejection_of(settings)
    weights = engine_weights(gap, weighting, rejection)
    final = weights.bounded / weight_normaliser
    metrics |= _weight_metrics(settings.tis_mode, weighting, weights, final, lengths)
    if rejection is not None:
        metrics |= _rejection_metrics(gap, rejection, weights)
    if settings.tis_batch_normalize:
        metrics["batch_norm_factor"] = torch.full_like(mask, 1 / weight_normaliser)
    return list(final.split(lengths)), list(weights.kept.split(lengths)), _split(metrics, lengths)


def _split(metrics: dict[str, Tensor], lengths: list[int]) -> dict[str, list[Tensor]]:
    return {name: list(value.split(lengths)) for name, value in metrics.items()}


def _weight_metrics(
    mode: str, weighting: Weighting, weights: Weights, final: Tensor, lengths: list[int]
) -> dict[str, Tensor]:
    low, high = (weights.raw < weighting.low).float(), (weights.raw > weighting.high).float()
    metrics = {"tis_weight_before_bound": weights.raw, "tis_weight_after_bound": weights.bounded}
    if mode == "truncate":
        metrics["tis_truncate_fraction"] = high
    else:
        metrics |= {f"tis_{mode}_fraction_low": low, f"tis_{mode}_fraction_high": high}
    used = final * weights.kept
    spans = [span for span in used.split(lengths) if len(span)]
    filled = [length for length in lengths if length]
    metrics["is_ratio_mean_final"] = used
    metrics["is_ratio_min_final"] = spread(torch.stack([span.min() for span in spans]), filled) if spans else used
    metrics["is_ratio_max_final"] = spread(torch.stack([span.max() for span in spans]), filled) if spans else used
    return metrics


def _rejection_metrics(gap: EngineGap, rejection: Rejection, weights: Weights) -> dict[str, Tensor]:
    ratio = gap.ratios(rejection.level)
    metrics = {
        "rs_mask_fraction_low": (ratio < rejection.low).float(),
        "rs_mask_fraction_high": (ratio > rejection.high).float(),
        "rs_reject_fraction": gap.mask - weights.kept,
    }
    if rejection.veto is not None:
        metrics["catastrophic_token_fraction"] = (gap.ratios("token") < rejection.veto).float()
        metrics["catastrophic_seq_fraction"] = weights.vetoed
    return metrics
