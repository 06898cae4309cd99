"""Debug dumps of rollouts and their replay.

A dump is ``{"rollout_id", "samples": [dict]}`` written with ``torch.save``; attributes and traces that
user code put on a sample are part of it. Tests hold: what is loaded equals what was saved.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from slime.data.batch import flatten_groups
from slime.errors import DataError
from slime.files import write_atomically
from slime.types import Group, Sample


def dump_path(template: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    """The file of one rollout: ``{rollout_id}`` in the template, ``eval_`` before it for evaluation.

    Raises:
        DataError: The template has another placeholder.
    """
    try:
        return Path(template.format(rollout_id=f"eval_{rollout_id}" if evaluation else rollout_id))
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"dump path {template!r}: only {{rollout_id}} can be filled in ({error!r})") from error


def save_rollout(template: str, rollout_id: int, groups: Sequence[Any], *, evaluation: bool = False) -> Path:
    """Write the samples of a rollout (groups, fan-out lists or a flat list)."""
    path = dump_path(template, rollout_id, evaluation=evaluation)
    samples = [sample.to_dict() for sample in flatten_groups(groups)[0]]
    write_atomically(path, lambda aside: torch.save({"rollout_id": rollout_id, "samples": samples}, aside))
    return path


def load_rollout(
    template: str, rollout_id: int, *, evaluation: bool = False, subsample: float | None = None
) -> list[Sample]:
    """Read the samples of a dumped rollout.

    Args:
        template: ``--load-debug-rollout-data``.
        rollout_id: Which rollout.
        evaluation: Whether the evaluation dump is meant.
        subsample: Share of the rows to keep, half from each end.

    Raises:
        DataError: The dump is missing or is none.
    """
    path = dump_path(template, rollout_id, evaluation=evaluation)
    if not path.is_file():
        raise DataError(f"no rollout dump at {path} (--load-debug-rollout-data {template}, rollout {rollout_id})")
    try:
        # Samples carry numpy columns and whatever user code attached, so this is a pickle; load only dumps you trust.
        content: Any = torch.load(path, map_location="cpu", weights_only=False)
        rows = cast(list[dict[str, Any]], content["samples"])
        samples = [Sample.from_dict(row) for row in rows]
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} is not a rollout dump with rollout_id and samples: {error!r}") from error
    return samples if subsample is None else take_both_ends(samples, subsample)


def take_both_ends(samples: Sequence[Sample], share: float) -> list[Sample]:
    """``int(N * share)`` samples: the first half of them from the start, the rest from the end."""
    kept = int(len(samples) * share)
    first = kept // 2
    return [*samples[:first], *samples[len(samples) - (kept - first) :]]


def regroup(samples: Iterable[Sample]) -> list[Group]:
    """Samples by ``group_index`` in first-seen order; one without is a group of its own."""
    groups: dict[Any, Group] = {}
    for position, sample in enumerate(samples):
        key = ("none", position) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(sample)
    return list(groups.values())
