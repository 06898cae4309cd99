"""A process killed at any moment of a save: the newest complete checkpoint is there, and it is the right one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.gloo import Rank, RanksFailed, run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker, weights_of

BATCHES = [make_rollout(seed=i, rollout_id=i) for i in range(3)]
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
"""Audit events that change a directory."""


def die_at_change(root: Path, number: int, delay_seconds: float) -> list[str]:
    """Kill this process when it changes something below ``root`` for the ``number``-th time; returns the changes."""
    changes: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES:
            return
        folder = Path(f"/proc/self/fd/{args[1]}").readlink() if event == "os.remove" and args[1] >= 0 else Path()
        if not str(folder / str(args[0])).startswith(str(root)):
            return
        if event == "open" and not (isinstance(args[1], str) and set(args[1]) & set("wax+")):
            return
        changes.append(event)
        if len(changes) == number + 1:
            if delay_seconds:
                threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return changes


def save_three_times(rank: Rank, model: Path, root: Path, background: bool, number: int, delay: float) -> Any:
    """Train and save three rollouts, dying in a save after the first.

    Returns:
        Names of all changes, and the weights after each rollout, if it lives.
    """
    config = config_for(model, root, background)
    weights = []
    with running_worker(config, rank) as worker:
        changes: list[str] = []
        for batch in BATCHES:
            worker.train(batch)
            weights.append(weights_of(worker))
            worker.save(batch.rollout_id)
            if batch.rollout_id == 0:
                worker.finish_save()
                changes = die_at_change(root, number, delay)
        worker.finish_save()
    return changes, weights


def config_for(model: Path, root: Path, background: bool, *, load: bool = False) -> Any:
    checkpoint = {"save": str(root), "keep_checkpoints": 1, "async_save": background}
    return make_config(
        model,
        ("--lr", "1e-2", "--lr-decay-style", "constant"),
        data={"global_batch_size": 12, "micro_batch_size": 13},
        checkpoint=checkpoint | {"load": str(root) if load else None},
    )


def resumed(rank: Rank, model: Path, root: Path) -> tuple[int, dict[str, Tensor]]:
    """Where a run continues, with which weights; it can go on and save."""
    with running_worker(config_for(model, root, False, load=True), rank) as worker:
        first, weights = worker.first_rollout_id, weights_of(worker)
        if first < len(BATCHES):
            worker.train(BATCHES[first])
            worker.save(first)
    return first, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def unharmed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[dict[str, Tensor]]]:
    return run_ranks(1, save_three_times, model, tmp_path_factory.mktemp("whole"), False, 10_000, 0.0)[0]


MOMENTS = [(number, 0.0) for number in range(22)] + [(1, 0.0005), (1, 0.002), (4, 0.001)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("background", [False, True], ids=["at_once", "background"])
@pytest.mark.parametrize(("number", "delay"), MOMENTS)
def test_the_newest_complete_checkpoint_survives(
    number: int,
    delay: float,
    background: bool,
    model: Path,
    unharmed: tuple[list[str], list[dict[str, Tensor]]],
    tmp_path: Path,
) -> None:
    changes, weights = unharmed
    assert {"open", "os.rename", "os.mkdir", "os.remove"} <= set(changes)
    if number >= len(changes):
        pytest.skip(f"two saves take {len(changes)} changes")
    with pytest.raises(RanksFailed, match="died without a word"):
        run_ranks(1, save_three_times, model, tmp_path, background, number, delay)
    first, found = run_ranks(1, resumed, model, tmp_path)[0]
    newest = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert first >= 1
    assert newest == min(first, len(BATCHES) - 1)
    assert all(found[name].equal(tensor) for name, tensor in weights[first - 1].items())
    # What the killed save left went with the next one.
    if first < len(BATCHES):
        assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]
