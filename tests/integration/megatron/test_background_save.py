"""``--async-save``: training goes on while the files are written, and nothing it does reaches them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from slime.config import Config
from slime.errors import CheckpointError
from tests.support.gloo import Rank, free_port, run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker, weights_of

from slime.backends.megatron.checkpoint_files import PendingSave  # isort: skip  (after the CPU substitutions)

pytestmark = pytest.mark.timeout(200)

BATCHES = [make_rollout(seed=i, rollout_id=i) for i in range(4)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def config_for(
    model_dir: Path, save: Path, *, load: Path | None = None, precision: str = "fp32", num_processes: int = 1
) -> Config:
    return make_config(
        model_dir,
        ("--lr", "1e-2", "--lr-decay-style", "constant"),
        num_processes=num_processes,
        data={"global_batch_size": 6, "micro_batch_size": 5},
        train={"precision": precision},
        checkpoint={"save": str(save), "load": None if load is None else str(load), "async_save": True},
    )


@contextmanager
def held_back_writers() -> Iterator[threading.Event]:
    """Writers wait for the event before they write."""
    go, write = threading.Event(), PendingSave.write

    def held(self: PendingSave) -> None:
        assert go.wait(60), "nobody let the writer go"
        write(self)

    with mock.patch.object(PendingSave, "write", held):
        yield go
        go.set()


def tracker(root: Path) -> str | None:
    path = root / "latest_checkpointed_iteration.txt"
    return path.read_text() if path.exists() else None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_written_is_the_state_at_the_save(model_dir: Path, tmp_path: Path, precision: str) -> None:
    with held_back_writers() as go, running_worker(config_for(model_dir, tmp_path, precision=precision)) as worker:
        worker.train(BATCHES[0])
        at_save = weights_of(worker)
        worker.save(0)
        worker.train(BATCHES[1])  # goes on although nothing was written, and changes every weight
        want = weights_of(worker)
        assert not any(want[name].equal(tensor) for name, tensor in at_save.items())
        assert (tracker(tmp_path), worker.last_complete_save) == (None, None)
        go.set()
        worker.finish_save()
        assert (tracker(tmp_path), worker.last_complete_save) == ("0", 0)
    with running_worker(config_for(model_dir, tmp_path, load=tmp_path, precision=precision)) as worker:
        assert worker.first_rollout_id == 1
        assert all(torch.equal(got, at_save[name]) for name, got in weights_of(worker).items())
        worker.train(BATCHES[1])  # equal only if the optimizer's state is that of the save too
        assert all(torch.equal(got, want[name]) for name, got in weights_of(worker).items())


def test_training_completes_a_written_save_and_the_next_save_waits(model_dir: Path, tmp_path: Path) -> None:
    with held_back_writers() as go, running_worker(config_for(model_dir, tmp_path)) as worker:
        worker.save(0)
        worker.train(BATCHES[0])
        assert tracker(tmp_path) is None
        go.set()
        worker._saver._thread.join()
        worker.train(BATCHES[1])
        assert (tracker(tmp_path), worker.last_complete_save) == ("0", 0)
        worker.save(1)
        worker.save(2)
        assert worker.last_complete_save == 1
        worker.finish_save()
        worker.finish_save()  # nothing is left to do
    assert (tracker(tmp_path), worker.last_complete_save) == ("2", 2)


def train_with_a_full_disk(rank: Rank, config: Config) -> tuple[str, str | None, int | None]:
    """Save twice; the second save fails on the last rank. What the next step says, and what is there then."""
    write_buckets = PendingSave._write_buckets

    def fail(self: PendingSave) -> Any:
        if self.rollout_id == 1 and rank.rank == rank.world_size - 1:
            raise OSError(28, "No space left on device")
        return write_buckets(self)

    with mock.patch.object(PendingSave, "_write_buckets", fail), running_worker(config, rank) as worker:
        worker.train(BATCHES[0])
        worker.save(0)
        worker.save(1)
        worker._saver._thread.join()
        with pytest.raises(CheckpointError) as raised:
            worker.train(BATCHES[1])
        worker.train(BATCHES[1])
        return str(raised.value), tracker(Path(config.checkpoint.save or "")), worker.last_complete_save


def test_a_failure_is_raised_by_the_next_step_on_every_rank(model_dir: Path, tmp_path: Path) -> None:
    config = config_for(model_dir, tmp_path, num_processes=2)
    for message, newest, last in run_ranks(2, train_with_a_full_disk, config):
        assert "rollout 1" in message
        assert "rank 1" in message
        assert "No space left on device" in message
        assert (newest, last) == ("0", 0)
    with running_worker(config_for(model_dir, tmp_path, load=tmp_path), Rank(0, 1, free_port())) as worker:
        assert worker.first_rollout_id == 1
