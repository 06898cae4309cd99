"""Divisions of an engine that SGLang would refuse when it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime.config.draft import Surroundings
from slime.config.sglang_checks import split_problems

from .conftest import Run

Problems = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("num_gpus", "values"),
    [
        (1, {}),
        (8, {"pp_size": 2, "ep_size": 4}),
        (8, {"dp_size": 8, "enable_dp_attention": True, "ep_size": 8}),
        (8, {"ep_size": 4, "moe_dp_size": 2}),
    ],
)
def test_possible_divisions(num_gpus: int, values: dict[str, Any]) -> None:
    assert split_problems(num_gpus, values) == []


@pytest.mark.parametrize(
    ("num_gpus", "values", "words"),
    [
        (4, {"pp_size": 3}, "--rollout-num-gpus-per-engine 4 is not a multiple of --sglang-pp-size 3"),
        (4, {"pp_size": 0}, "--sglang-pp-size 0: must be at least 1"),
        (4, {"dp_size": 2}, "--sglang-dp-size 2 needs --sglang-enable-dp-attention"),
        (4, {"dp_size": 3, "enable_dp_attention": True}, "--sglang-dp-size 3 does not divide"),
        (8, {"pp_size": 2, "ep_size": 8}, "--sglang-ep-size 8 does not divide the tensor-parallel size 4"),
        (8, {"ep_size": 8, "moe_dp_size": 2}, "--sglang-ep-size 8 x --sglang-moe-dp-size 2 does not divide"),
        (8, {"moe_dp_size": 3}, "--sglang-moe-dp-size 3 does not divide"),
    ],
)
def test_impossible_divisions(num_gpus: int, values: dict[str, Any], words: str) -> None:
    problems = split_problems(num_gpus, values)
    assert len(problems) == 1
    assert words in problems[0]


def test_they_are_reported_with_the_command_line(problems: Problems, run: Run, cuda: Surroundings) -> None:
    line = "--rollout-backend sglang --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4"
    assert run(f"{line} --actor-num-gpus-per-node 4", surroundings=cuda).engine.rollout_backend == "sglang"
    found = problems(f"{line} --actor-num-gpus-per-node 4 --sglang-pp-size 3", surroundings=cuda)
    assert "--rollout-num-gpus-per-engine 4 is not a multiple of --sglang-pp-size 3" in found[0]


STAGES = "--rollout-backend sglang --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --sglang-pp-size 2"


@pytest.mark.parametrize("transport", ["nccl", "broadcast"])
def test_pipeline_stages_take_weights_from_disk_only(problems: Problems, cuda: Surroundings, transport: str) -> None:
    (problem,) = problems(f"{STAGES} --update-weight-transport {transport}", surroundings=cuda)
    assert problem == (
        f"engines of several pipeline stages take weights from disk only, found --update-weight-transport {transport}; "
        "use disk with --update-weight-disk-dir, or leave --sglang-pp-size out"
    )


@pytest.mark.parametrize(
    "flags", ["--update-weight-transport disk --update-weight-disk-dir shared", "--debug-rollout-only"]
)
def test_stages_that_get_their_weights_or_need_none(run: Run, cuda: Surroundings, flags: str) -> None:
    assert run(f"{STAGES} {flags}", surroundings=cuda).sglang["pp_size"] == 2


def test_what_needs_cuda_is_refused_on_a_cpu(problems: Problems) -> None:
    found = problems(
        "--rollout-backend sglang --sglang-enable-deterministic-inference",
        surroundings=Surroundings(sglang_installed=True),
    )
    assert found == [
        "--sglang-enable-deterministic-inference: its kernels need CUDA, and this run is on a CPU; leave it out"
    ]
