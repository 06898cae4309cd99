"""The engine / trainer correction that the flags ask for.

Owns its settings, the choice between the built-in and a user's function, and the one number of
batch normalisation, which is known before the first micro-batch: the mean weight over the whole
rollout, from the old-policy pass. Tests hold: a custom function that repeats the built-in
arithmetic gives the built-in loss; the mean does not depend on how samples are spread over ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from slime.algorithms.corrections import (
    Corrected,
    Correction,
    EngineGap,
    Rejection,
    Weighting,
    engine_correction,
    weight_total,
)
from slime.algorithms.reduction import blank_masked
from slime.backends.megatron.batches import MicroBatch
from slime.backends.megatron.hooks import TrainHooks, join
from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.rollout_columns import RolloutColumns
from slime.config import ArgsView
from slime.config.sections import AlgorithmConfig
from slime.errors import DataError, PluginError


def weighting_of(algorithm: AlgorithmConfig) -> Weighting:
    """The importance weights of the flags, whether or not they are applied."""
    if algorithm.use_icepop:
        return Weighting(low=algorithm.tis_clip_low, high=algorithm.tis_clip, mode="zero")
    low, high = algorithm.tis_bounds
    if algorithm.tis_mode == "truncate":
        low = algorithm.tis_clip_low
    mode = "mask" if algorithm.tis_mode == "mask" else "clip"
    return Weighting(low=low, high=high, level=algorithm.tis_level, mode=mode)


def rejection_of(algorithm: AlgorithmConfig) -> Rejection | None:
    """The rejection of ``--use-rs``."""
    if not algorithm.use_rs:
        return None
    low, high = algorithm.rs_bounds
    return Rejection(low=low, high=high, level=algorithm.rs_level, veto=algorithm.rs_veto_threshold)


def weight_normaliser(
    algorithm: AlgorithmConfig, columns: RolloutColumns, samples: Sequence[int], parallel: ParallelState
) -> float:
    """The mean weight of the rollout for ``--tis-batch-normalize``, else 1.

    Collective over the data-parallel group, on the last pipeline stage, where the log-probs are. A
    rollout that keeps no token, or whose weights are all but zero, is not normalised.

    Raises:
        DataError: The engine's log-probs were not recorded.
    """
    wanted = algorithm.use_tis and algorithm.tis_batch_normalize and algorithm.loss_type == "policy_loss"
    if not wanted or not parallel.is_pp_last:
        return 1.0
    if columns.rollout_log_probs is None:
        raise DataError("--use-tis: the samples carry no rollout_log_probs; the generate function must record them")
    assert columns.old_log_probs is not None, "batch normalisation has an old-policy pass"
    weighting, rejection = weighting_of(algorithm), rejection_of(algorithm)
    total = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    for i in samples:
        mask = columns.masks[i]
        trainer, engine = (blank_masked(c[i], mask) for c in (columns.old_log_probs, columns.rollout_log_probs))
        gap = EngineGap(trainer=trainer, engine=engine, mask=mask, lengths=(len(mask),))
        total += weight_total(gap, weighting, rejection).to(total.device)
    if parallel.dp_size > 1:
        dist.all_reduce(total, group=parallel.dp_group)
    weight_sum, count = total.tolist()
    mean = weight_sum / max(count, 1.0)
    return mean if mean > 1e-8 else 1.0


def correction_for(
    algorithm: AlgorithmConfig, hooks: TrainHooks, micro_batch: MicroBatch, mask: Tensor, normaliser: float
) -> Correction | None:
    """The correction bound to one micro-batch; None when no flag asks for one."""
    weighted = algorithm.use_tis or algorithm.use_icepop
    if hooks.tis is not None:
        called = weighted or algorithm.use_rs or algorithm.get_mismatch_metrics
        return _custom_correction(hooks.tis, hooks.args, micro_batch, mask, normaliser) if called else None
    if weighted or algorithm.use_rs:
        weighting = weighting_of(algorithm) if weighted else None
        return engine_correction(weighting, rejection_of(algorithm), normaliser=normaliser)
    if algorithm.get_mismatch_metrics:
        return engine_correction(weighting_of(algorithm), measure=True)
    return None


def _custom_correction(
    function: Callable[..., Any], args: ArgsView, micro_batch: MicroBatch, mask: Tensor, normaliser: float
) -> Correction:
    """The user's function; one that has a parameter ``weight_normaliser`` gets it too."""
    lengths = list(micro_batch.response_lengths)
    takes_normaliser = "weight_normaliser" in inspect.signature(function).parameters
    options = {"weight_normaliser": normaliser} if takes_normaliser else {}

    def correct(loss: Tensor, gap: EngineGap) -> Corrected:
        result = function(
            args=args,
            pg_loss=loss,
            train_log_probs=list(gap.trainer.split(lengths)),
            rollout_log_probs=list(gap.engine.split(lengths)),
            loss_masks=list(mask.split(lengths)),
            total_lengths=list(micro_batch.total_lengths),
            response_lengths=lengths,
            **options,
        )
        if not isinstance(result, tuple) or len(result) != 3:
            raise PluginError("--custom-tis-function-path must return (pg_loss, modified_masks, metrics)")
        corrected, masks, metrics = result
        flat_mask = None if masks is None else join(masks).to(mask.dtype)
        return Corrected(loss=corrected, mask=flat_mask, metrics={k: join(v) for k, v in metrics.items()})

    return correct
