"""What the tests of the pipeline share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.rollout.context import RolloutContext
from slime.rollout.pipeline import generate_rollout
from slime.rollout.types import RolloutFnTrainOutput


def rollout(context: RolloutContext, source: Any, rollout_id: int = 0) -> RolloutFnTrainOutput:
    """Run the default training rollout."""
    return context.generate(generate_rollout, rollout_id, source)


def write_plugin(folder: Path, text: str) -> str:
    """A file with functions of a user; its path."""
    path = folder / "plugin.py"
    path.write_text("import asyncio\nfrom slime.utils.types import Sample\n" + text)
    return str(path)
