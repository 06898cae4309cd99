"""Leaving and coming back to a CUDA device, and whole colocated runs on it."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.setting import QWEN3_600M
from slime.observability.tracking import read_metrics
from tests.e2e.commands import ROOT, arguments, make_inputs
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker, weights_of

from slime.backends.megatron import parallel  # isort: skip
from slime.backends.megatron.device_state import Part  # isort: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GIB = 1 << 30
RESIDUE_BYTES = 2 * GIB
"""What may stay: the CUDA context with its libraries, and NCCL's buffers."""


@pytest.fixture(autouse=True)
def _leave_groups() -> Iterator[None]:
    yield
    parallel.destroy()
    gc.collect()
    torch.cuda.empty_cache()


def state_of(worker: Any) -> list[torch.Tensor]:
    parts = worker._trainable.optimizer_parts
    inside = [value for part in parts for state in part.optimizer.state.values() for value in state.values()]
    main = [p.detach() for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    return [tensor.cpu().clone() for tensor in (*main, *inside)]


def test_everything_comes_back_bit_for_bit_and_little_stays(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", **QWEN3_600M)
    config = make_config(
        folder,
        ("--lr", "1e-4", "--lr-decay-style", "constant"),
        cluster={"device": "cuda"},
        train={"precision": "bf16"},
        data={"global_batch_size": 6, "micro_batch_size": 8},
    )
    with running_worker(config) as worker:
        worker.train(make_rollout())
        weights, state = {n: t.cpu() for n, t in weights_of(worker).items()}, state_of(worker)
        awake = worker.device_memory
        worker.sleep()
        asleep = worker.device_memory
        assert worker._device_state.on_device == ()
        assert awake["trainer_bytes"] > 8 * GIB
        assert asleep["trainer_bytes"] < 0.5 * GIB
        assert asleep["device_bytes"] < RESIDUE_BYTES, f"{asleep['device_bytes'] / GIB:.2f} GiB stay"
        worker.hold_parameters()
        assert worker._device_state.on_device == (Part.PARAMETERS,)
        assert 1.0 * GIB < worker.device_memory["trainer_bytes"] < 2.0 * GIB
        assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in weights_of(worker).items())
        worker.sleep()
        worker.wake_up()
        assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in weights_of(worker).items())
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(state_of(worker), state, strict=True))
        assert worker.train(make_rollout(seed=1, rollout_id=1))["train/grad_norm"] > 0


@pytest.mark.parametrize("shape", ["tiny", "qwen3-0.6b"])
def test_a_colocated_run(shape: str, tmp_path: Path) -> None:
    """GRPO on one device; SGLang where it is installed."""
    inputs = make_inputs(tmp_path / "inputs")
    if shape == "qwen3-0.6b":
        make_tiny_model(inputs["model"], "qwen3", **QWEN3_600M)
    backend = "sglang" if importlib.util.find_spec("sglang") else "embedded"
    argv = arguments(inputs, tmp_path / "out", 2, "--colocate", "--rollout-backend", backend)
    if backend == "sglang":
        argv += ["--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch"]
        argv += ["--sglang-grammar-backend", "none", "--sglang-mem-fraction-static", "0.5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *argv],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "train/loss" in row]
    assert [row["train/step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] < 0.1
        assert row["memory/trainer_asleep_trainer_bytes"] < 0.5 * GIB
        assert row["memory/trainer_asleep_device_bytes"] > 0
