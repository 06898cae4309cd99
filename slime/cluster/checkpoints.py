"""What the driver writes and removes beside the trainer's checkpoints: data states, the critic's part of a pair.

Tests hold: the state written for a rollout, which was made right after it, is that of the rollout, however
far others are ahead; no generation in progress can hold up a save; a critic goes after its actor.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import torch

from slime.data.source import RolloutDataSource, state_path
from slime.files import write_atomically


def take_data_state(source: Any, rollout_id: int) -> bytes | None:
    """State of the data source right after ``rollout_id``, as the content of its file.

    A class with a ``save`` of its own writes now, because later it would be ahead; then there is
    nothing left to write.
    """
    if not isinstance(source, RolloutDataSource) or type(source).save is not RolloutDataSource.save:
        source.save(rollout_id)
        return None
    content = io.BytesIO()
    torch.save(source.state_for(rollout_id), content)
    return content.getvalue()


def write_data_state(save_dir: Path, rollout_id: int, content: bytes) -> None:
    """Write a state below ``save_dir``."""
    write_atomically(state_path(str(save_dir), rollout_id), lambda path: path.write_bytes(content))


def prune_data_states(save_dir: Path, keep: int | None, *, newest: int) -> None:
    """Remove data states older than ``newest`` whose checkpoint is gone; all stay when ``keep`` is None."""
    if keep is None:
        return
    for path in (save_dir / "rollout").glob("global_dataset_state_dict_*.pt"):
        number = path.stem.rpartition("_")[2]
        if number.isdigit() and int(number) < newest and not (save_dir / f"iter_{int(number):07d}").exists():
            path.unlink(missing_ok=True)


def prune_critic(critic_dir: Path, *, actor_dir: Path, newest: int) -> None:
    """Remove checkpoints of the critic older than ``newest`` whose actor is gone: alone they are of no use."""
    for path in critic_dir.glob("iter_*"):
        number = path.name.removeprefix("iter_")
        if number.isdigit() and int(number) < newest and not (actor_dir / path.name).exists():
            # Renamed first, so that a half-removed one is never taken for a good one; the next save clears it away.
            doomed = path.with_name(f".{path.name}.deleting")
            path.rename(doomed)
            shutil.rmtree(doomed)
