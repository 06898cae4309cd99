"""Training that leaves its device between all steps gives the bits of training that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from slime.config import Config
from tests.support.gloo import Rank, free_port, run_ranks
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config, make_critic_config
from tests.support.workers import weights_of

from slime.backends.megatron import device_state  # isort: skip  (after the CPU substitutions)

pytestmark = pytest.mark.timeout(180)

BATCHES = [make_rollout(seed=i, rollout_id=i) for i in range(2)]
ARGV = ("--lr", "1e-2", "--lr-decay-style", "constant")
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "ref_update_interval": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


def config_for(model_dir: Path, *argv: str, num_processes: int = 1, **sections: dict[str, Any]) -> Config:
    defaults = {"data": {"global_batch_size": 6, "micro_batch_size": 5}, "train": {"precision": "bf16"}}
    return make_config(model_dir, (*ARGV, *argv), num_processes=num_processes, **(defaults | sections))


@contextmanager
def worker_of(config: Config, *, moves: bool, rank: Rank | None = None) -> Iterator[Any]:
    from slime.backends.megatron.critic import CriticWorker
    from slime.backends.megatron.worker import MegatronWorker

    rank = rank or Rank(0, 1, free_port())
    kind = CriticWorker if config.role == "critic" else MegatronWorker
    worker = kind(config, rank.rank, rank.world_size, "127.0.0.1", rank.port, moves_memory=moves)
    try:
        worker.init()
        yield worker
    finally:
        worker.close()


def turn(worker: Any) -> None:
    """What happens between two steps of a colocated run."""
    worker.hold_parameters()
    worker.update_weights()
    worker.sleep()
    worker.wake_up()


def train(config: Config, *, moves: bool, rank: Rank | None = None, save: bool = False) -> tuple[Any, Any, Any]:
    with worker_of(config, moves=moves, rank=rank) as worker:
        turn(worker)
        metrics = []
        for batch in BATCHES:
            found = worker.train(batch)
            metrics.append({name: value for name, value in found.items() if not name.startswith("perf/")})
            if save:
                worker.save(batch.rollout_id)
            turn(worker)
        worker.finish_save()
        return metrics, weights_of(worker), optimizer_state(worker)


def optimizer_state(worker: Any) -> list[torch.Tensor]:
    parts = worker._trainable.optimizer_parts
    states = [state for part in parts for state in part.optimizer.state.values()]
    main = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    return [v.detach().clone() for v in (*main, *(state[k] for state in states for k in ("exp_avg", "exp_avg_sq")))]


def assert_same(moved: tuple[Any, Any, Any], stayed: tuple[Any, Any, Any]) -> None:
    assert moved[0] == stayed[0]
    assert moved[1].keys() == stayed[1].keys()
    assert all(torch.equal(tensor, stayed[1][name]) for name, tensor in moved[1].items())
    assert len(moved[2]) == len(stayed[2]) > 0
    assert all(torch.equal(a, b) for a, b in zip(moved[2], stayed[2], strict=True))


CASES: dict[str, tuple[tuple[str, ...], dict[str, dict[str, Any]]]] = {
    "fp32": ((), {"train": {"precision": "fp32"}}),
    "reference": ((), {"algorithm": REFERENCE}),
    "old_actor": ((), {"rollout": {"keep_old_actor": True}}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str, model_dir: Path) -> None:
    argv, sections = CASES[name]
    config = config_for(model_dir, *argv, **sections)
    assert_same(train(config, moves=True), train(config, moves=False))


def train_both(rank: Rank, config: Config, ports: Sequence[int]) -> tuple[Any, Any]:
    return tuple(
        train(config, moves=moves, rank=Rank(rank.rank, rank.world_size, port))
        for moves, port in zip((True, False), ports, strict=True)
    )  # type: ignore[return-value]


def test_same_bits_on_two_ranks(model_dir: Path) -> None:
    flags = ("--overlap-grad-reduce", "--overlap-param-gather")
    config = config_for(model_dir, *flags, num_processes=2)
    for moved, stayed in run_ranks(2, train_both, config, [free_port(), free_port()]):
        assert_same(moved, stayed)


@pytest.mark.parametrize("async_save", [False, True])
def test_checkpoints_hold_the_same(async_save: bool, model_dir: Path, tmp_path: Path) -> None:
    def config(name: str, load: Path | None = None) -> Config:
        checkpoint = {
            "save": str(tmp_path / name),
            "async_save": async_save,
            "load": None if load is None else str(load),
        }
        return config_for(model_dir, checkpoint=checkpoint)

    states = []
    for name, moves in (("moved", True), ("stayed", False)):
        train(config(name), moves=moves, save=True)
        with worker_of(config("again", load=tmp_path / name), moves=False) as worker:
            states.append(([], weights_of(worker), optimizer_state(worker)))
    assert_same(*states)


def live_bytes(exclude: set[int]) -> int:
    """Memory of every tensor that Python still knows of, garbage included; storages once."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            if storage.data_ptr() not in exclude:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_nothing_is_left_after_sleep(model_dir: Path) -> None:
    gc.collect()
    before = live_bytes(set())
    config = config_for(model_dir)
    with worker_of(config, moves=True) as worker:
        gc.collect()
        gc.disable()  # what waits for the collector counts
        try:
            worker.train(BATCHES[0])
            awake = live_bytes(set()) - before
            worker.sleep()
            state = worker._device_state
            copies = {b.untyped_storage().data_ptr() for space in state._host.values() for b in space._blocks}
            asleep = live_bytes(copies) - before
            parameters = sum(p.numel() for p in worker.chunks[0].parameters())
            # bf16 weights, fp32 gradients, and on the optimizer's side fp32 weights and two moments
            assert awake >= (2 + 4 + 12) * parameters
            assert asleep < 0.01 * awake
            assert sum(space.num_bytes for space in state._host.values()) == pytest.approx(
                (2 + 12) * parameters, rel=0.02
            )
            worker.hold_parameters()
            assert live_bytes(copies) - before == pytest.approx(asleep + 2 * parameters, rel=0.02)
        finally:
            gc.enable()


def test_repeated_calls_and_any_order_are_fine(model_dir: Path) -> None:
    with worker_of(config_for(model_dir), moves=True) as worker:
        worker.wake_up()
        want = weights_of(worker)
        for method in ("sleep", "sleep", "hold_parameters", "hold_parameters", "wake_up", "hold_parameters", "sleep"):
            getattr(worker, method)()
        worker.hold_parameters()
        found = weights_of(worker)
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_the_critic_sleeps_between_its_turns(model_dir: Path) -> None:
    config = make_critic_config(
        model_dir, ARGV, data={"global_batch_size": 6, "micro_batch_size": 5}, train={"precision": "bf16"}
    )

    def outcome(moves: bool) -> tuple[Any, Any, Any]:
        with worker_of(config, moves=moves) as worker:
            found: list[Any] = []
            for batch in BATCHES:
                worker.sleep()
                worker.wake_up()
                values = worker.score(batch)
                worker.sleep()  # the actor's turn
                worker.wake_up()
                returns = {sample: row + 1 for sample, row in values.items()}
                metrics = worker.train(batch, values, returns)
                found.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
                found.append({sample: row.tolist() for sample, row in values.items()})
            weights = {name: p.detach().clone() for name, p in worker.chunks[0].named_parameters()}
            return found, weights, optimizer_state(worker)

    assert_same(outcome(True), outcome(False))


def test_host_space_cuts_storages_at_its_blocks() -> None:
    with mock.patch.object(device_state, "BLOCK_BYTES", 8):
        space = device_state.HostSpace(pinned=False)
        space.reserve(5)
        space.reserve(21)
        assert space.num_bytes == 21
        for start, length in ((0, 21), (3, 9), (5, 0), (20, 1), (12, 8)):
            for k, piece in enumerate(space.pieces(start, length)):
                piece.fill_(k + 1)
            whole = np.concatenate([piece.numpy() for piece in space.pieces(0, 21)])
            assert (whole[start : start + length] > 0).all()
            assert sum(piece.numel() for piece in space.pieces(start, length)) == length
