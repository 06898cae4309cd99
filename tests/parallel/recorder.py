"""A plug-in that keeps what every sample got before the update; named by ``--rollout-data-postprocess-path``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

PATH = f"{__name__}:record"

COLUMNS = ("log_probs", "ref_log_probs", "values", "advantages")

RECORDED: dict[tuple[int, int, str], Tensor] = {}
"""(rollout, sample, column) -> ``[R]``; of this process."""


def record(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Keep this rank's token columns."""
    del args
    for name in COLUMNS:
        rows = rollout_data.get(name)
        for sample, row in zip(rollout_data["sample_indices"], rows or [], strict=False):
            RECORDED[rollout_id, sample, name] = row.detach().clone()


def take() -> dict[tuple[int, int, str], Tensor]:
    """What was recorded since the last call."""
    found = dict(RECORDED)
    RECORDED.clear()
    return found
