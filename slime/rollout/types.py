"""What a rollout function returns, and how one is called.

Owns the two result containers and the call that every rollout function, ours or a user's, goes
through. Tests hold that the established bare returns are wrapped and that anything else is
refused with the name of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.errors import PluginError
from slime.types import Sample

GroupItem = Sample | list[Sample]
"""One sample, or the list of samples that a custom function fanned one trajectory out to."""

RolloutGroup = list[GroupItem]
"""What became of one prompt."""


@dataclass
class RolloutFnTrainOutput:
    """Result of a training rollout.

    Args:
        samples: One entry per prompt; its entries are samples, or lists of samples where a custom
            function fanned one trajectory out.
        metrics: Further metrics to log with the rollout, ``area/name`` to number.
    """

    samples: list[RolloutGroup]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Result of an evaluation.

    Args:
        data: Name of the set to ``{"rewards": [...], "truncated": [...], "group_ids": [...],
            "samples": [...]}``, one entry per sample each; ``group_ids`` says which samples share a
            prompt. Functions of users may leave out all but the rewards.
        metrics: Further metrics to log with the evaluation.
    """

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function and bring what it returns into its container.

    Args:
        fn: ``fn(args, rollout_id, data_source, evaluation=False)``.
        *args: Positional arguments of ``fn``.
        evaluation: Passed on by keyword; decides the container.
        **kwargs: Keyword arguments of ``fn``.

    Returns:
        ``RolloutFnEvalOutput`` when ``evaluation``, else ``RolloutFnTrainOutput``.

    Raises:
        PluginError: ``fn`` returned neither its container nor the established bare form of it.
    """
    output = fn(*args, **kwargs, evaluation=evaluation)
    if evaluation:
        if isinstance(output, RolloutFnEvalOutput):
            return output
        if isinstance(output, dict):
            return RolloutFnEvalOutput(data=output)
        expected = "RolloutFnEvalOutput, or a dict of data set name to results"
    else:
        if isinstance(output, RolloutFnTrainOutput):
            return output
        if isinstance(output, list):
            return RolloutFnTrainOutput(samples=output)
        expected = "RolloutFnTrainOutput, or a list of groups"
    flag = "--eval-function-path" if evaluation else "--rollout-function-path"
    name = getattr(fn, "__qualname__", repr(fn))
    raise PluginError(f"{flag}: {name} returned {type(output).__name__}; expected {expected}")


def iter_samples(group: RolloutGroup | list[Sample]) -> Iterator[Sample]:
    """Every sample of a group, fan-out lists flattened at any depth, in order."""
    for item in group:
        if isinstance(item, Sample):
            yield item
        else:
            yield from iter_samples(item)


def first_index(group: RolloutGroup | list[Sample]) -> int:
    """Sort key of a group: ``index`` of its first sample; groups without one come first."""
    for sample in iter_samples(group):
        return -1 if sample.index is None else sample.index
    return -1
