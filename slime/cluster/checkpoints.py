"""Files that lie beside the trainer's checkpoints: the configuration, and the data states."""

from __future__ import annotations

import os
from pathlib import Path

from slime.config import Config

CONFIG_FILE = "slime_config.json"


def write_config(config: Config, save_dir: Path) -> None:
    """Write the resolved configuration, aside and then renamed."""
    save_dir.mkdir(parents=True, exist_ok=True)
    temporary = save_dir / f".{CONFIG_FILE}.{os.getpid()}"
    temporary.write_text(config.to_json(), encoding="utf-8")
    temporary.replace(save_dir / CONFIG_FILE)


def prune_data_states(save_dir: Path, keep: int | None, *, newest: int) -> None:
    """Remove data states whose checkpoint is gone; all stay when ``keep`` is None."""
    if keep is None:
        return
    for path in (save_dir / "rollout").glob("global_dataset_state_dict_*.pt"):
        number = path.stem.rpartition("_")[2]
        if number.isdigit() and int(number) != newest and not (save_dir / f"iter_{int(number):07d}").exists():
            path.unlink(missing_ok=True)
