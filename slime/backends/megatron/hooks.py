"""Users' functions inside the training step: loaded once, called with the arguments they were written for.

Owns the translation between our flat tensors and the lists of per-sample tensors of the established
signatures, and the corrections that users name by path. Tests hold: a custom function that repeats the
built-in arithmetic gives the built-in loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.corrections import Correction, EngineGap, icepop, truncated_importance
from slime.backends.megatron.batches import MicroBatch
from slime.config import ArgsView, Config
from slime.errors import ConfigError
from slime.plugins import load_plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainHooks:
    """What the flags name, or None: see the flag of the same name with ``custom`` and ``path`` around it."""

    args: ArgsView
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]] | None = None
    advantage: Callable[..., None] | None = None
    tis: Callable[..., tuple[Tensor, Any, dict[str, Tensor]]] | None = None
    pg_loss_reducer: Callable[..., Callable[[Tensor], Tensor]] | None = None
    rollout_data_postprocess: Callable[..., None] | None = None
    megatron_init: Callable[..., None] | None = None
    before_log_prob: Callable[..., None] | None = None
    before_train_step: Callable[..., None] | None = None


def load_hooks(config: Config) -> TrainHooks:
    """Load every hook that a flag names.

    Raises:
        PluginError: A path cannot be loaded. Signatures are checked with the command line.
        ConfigError: ``--loss-type custom_loss`` without a function.
    """
    algorithm, train, rollout = config.algorithm, config.train, config.rollout

    def load(path: str | None, flag: str) -> Any:
        return None if path is None else load_plugin(path, flag=flag, kind="other")

    if algorithm.loss_type == "custom_loss" and algorithm.custom_loss_function_path is None:
        raise ConfigError("--loss-type custom_loss needs --custom-loss-function-path")
    custom_loss = algorithm.custom_loss_function_path if algorithm.loss_type == "custom_loss" else None
    return TrainHooks(
        args=ArgsView(config),
        loss=load(custom_loss, "--custom-loss-function-path"),
        advantage=load(algorithm.custom_advantage_function_path, "--custom-advantage-function-path"),
        tis=load(algorithm.custom_tis_function_path, "--custom-tis-function-path"),
        pg_loss_reducer=load(algorithm.custom_pg_loss_reducer_function_path, "--custom-pg-loss-reducer-function-path"),
        rollout_data_postprocess=load(rollout.rollout_data_postprocess_path, "--rollout-data-postprocess-path"),
        megatron_init=load(train.custom_megatron_init_path, "--custom-megatron-init-path"),
        before_log_prob=load(
            train.custom_megatron_before_log_prob_hook_path, "--custom-megatron-before-log-prob-hook-path"
        ),
        before_train_step=load(
            train.custom_megatron_before_train_step_hook_path, "--custom-megatron-before-train-step-hook-path"
        ),
    )


def pg_reducer_for(
    hooks: TrainHooks, micro_batch: MicroBatch, *, per_token: bool
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The custom reducer of the policy loss, bound to one micro-batch; None without one, or for a placeholder."""
    make = hooks.pg_loss_reducer
    if make is None or not micro_batch.samples:  # a user's mean over no token would not be finite
        return None
    lengths = list(micro_batch.response_lengths)

    def reduce(values: Tensor, mask: Tensor) -> Tensor:
        return make(list(micro_batch.total_lengths), lengths, list(mask.split(lengths)), per_token)(values)

    return reduce


def join(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """One flat tensor from a list of per-sample tensors, or the tensor itself."""
    return rows if isinstance(rows, Tensor) else torch.cat(list(rows))


def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """Truncated importance sampling in the signature of ``--custom-tis-function-path``."""
    correct = truncated_importance(args.tis_clip_low, args.tis_clip)
    return _as_hook(correct, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """IcePop in the signature of ``--custom-tis-function-path``."""
    correct = icepop(args.tis_clip_low, args.tis_clip)
    return _as_hook(correct, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _as_hook(
    correct: Correction,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    gap = EngineGap(
        trainer=join(train_log_probs),
        engine=join(rollout_log_probs),
        mask=join(loss_masks),
        lengths=[len(mask) for mask in loss_masks],
    )
    corrected = correct(pg_loss, gap)
    return corrected.loss, loss_masks, corrected.metrics
