"""Continuing a learning-rate schedule from a checkpoint under the flags of the new run.

A run may be made longer: what only says how long the schedule is follows the command line. Any other
difference is refused, because training would silently leave the schedule it was on, unless Megatron's
``--override-opt-param-scheduler`` (the command line wins) or ``--use-checkpoint-opt-param-scheduler``
(the checkpoint wins) decides. Tests hold: the rate after continuing is that of the schedule in force.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from slime.errors import CheckpointError

logger = logging.getLogger(__name__)

_FLAGS: Mapping[str, str] = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay or --start-weight-decay",
    "end_wd": "--weight-decay or --end-weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""Part of a schedule -> the flag that sets it."""

_LENGTHS = ("lr_decay_steps", "wd_incr_steps")
"""Parts that follow from the length of the run, in samples."""

_GROUP_KEYS = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Parts that a parameter group repeats, and by which Megatron finds the group in a checkpoint."""


def continue_optimizer(
    optimizer: Any, scheduler: Any, optimizer_state: Any, saved: Mapping[str, Any], *, warmup_is_share: bool
) -> None:
    """Load the state of optimizer and schedule, and settle what differs from the flags.

    Args:
        optimizer: Megatron's optimizer.
        scheduler: Its schedule, built from the flags.
        optimizer_state: The checkpoint's state of the optimizer.
        saved: The checkpoint's state of the schedule.
        warmup_is_share: Whether the warm-up is a share of the length (``--lr-warmup-fraction``).

    Raises:
        CheckpointError: The flags contradict the checkpoint in more than the length.
    """
    lengths = (*_LENGTHS, "lr_warmup_steps") if warmup_is_share else _LENGTHS
    wanted = {name: getattr(scheduler, name) for name in (*_FLAGS, *_LENGTHS)}
    from_checkpoint = scheduler.use_checkpoint_opt_param_scheduler
    if not from_checkpoint and not scheduler.override_opt_param_scheduler:
        _refuse_conflicts({n: v for n, v in wanted.items() if n not in lengths}, saved)
        # Megatron would take any difference for a mistake; a longer run is none.
        saved = {**saved, **{name: _longer(name, wanted[name], saved[name]) for name in lengths}}
    in_force = saved if from_checkpoint else wanted
    _set_groups(optimizer.param_groups, wanted, saved)
    optimizer.load_state_dict(optimizer_state)
    _set_groups(optimizer.param_groups, saved, in_force)
    scheduler.load_state_dict(dict(saved))


def _refuse_conflicts(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    conflicts = [
        f"{_FLAGS[name]}: {value} given, {saved[name]} in the checkpoint"
        for name, value in wanted.items()
        if saved[name] != value
    ]
    if conflicts:
        raise CheckpointError(
            f"the learning-rate schedule differs from the checkpoint's ({'; '.join(conflicts)}). Give the "
            "checkpoint's values, or decide with --override-opt-param-scheduler (the command line wins) or "
            "--use-checkpoint-opt-param-scheduler (the checkpoint wins)"
        )


def _longer(name: str, wanted: Any, saved: Any) -> Any:
    if wanted != saved:
        logger.warning(
            "the length of the run changed: %s is %s samples from now on, it was %s in the checkpoint; the learning "
            "rate continues on the schedule of the new length",
            name,
            wanted,
            saved,
        )
    return wanted


def _set_groups(groups: Iterable[dict[str, Any]], old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Give every group that follows the schedule ``old`` the values of ``new``; groups of their own keep theirs."""
    for group in groups:
        for key in _GROUP_KEYS:
            if group.get(key) is not None and group[key] == old[key]:
                group[key] = new[key]
