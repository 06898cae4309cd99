from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slime.config.devices import count_cuda_devices
from slime.config.draft import Surroundings
from slime.config.plan import bytes_per_parameter, plan_text, trainer_bytes
from slime.config.reference import help_text, reference_page
from slime.config.schema import all_flag_specs

from .conftest import Run

ROOT = Path(__file__).parents[3]


def test_plan_names_processes_batches_and_notices(run: Run, cuda: Surroundings) -> None:
    text = plan_text(run("--actor-num-gpus-per-node 4 --rollout-num-gpus 2", surroundings=cuda))
    assert "trainer: 4 (1 node(s) x 4), GPU 0-3" in text
    assert "engine 1: sglang, GPU 5" in text
    assert "4 prompts x 8 samples = 32 samples per rollout = 1 optimizer step(s) x 32" in text
    assert "32 parameters" in text
    assert "page-locked" not in text
    shared = plan_text(run("--colocate --rollout-num-gpus 2 --bf16", surroundings=cuda))
    # 32 parameters: bf16 weights, and on each of two ranks half of the fp32 weights and moments
    assert "of it in host memory while the engines generate: 0.2 KiB, page-locked" in shared
    text = plan_text(run("--colocate --rollout-num-gpus 2"))
    assert "page-locked" not in text
    assert "engine 0: embedded, CPU process 0" in text
    assert "colocated" in text


def test_trainer_bytes_per_parameter(run: Run) -> None:
    """Weights, fp32 gradients, and optimizer state sharded over two data-parallel ranks."""
    assert bytes_per_parameter(run()) == 4 + 4 + 8 / 2
    assert bytes_per_parameter(run("--bf16")) == 2 + 4 + 12 / 2
    assert bytes_per_parameter(run("--bf16 --tensor-model-parallel-size 2")) == 2 + 4 + 12


def test_experts_are_split_over_their_own_ranks(run: Run) -> None:
    """Half of the experts on each rank, their optimizer state over the two ranks that hold the same ones."""
    config = run("--actor-num-gpus-per-node 4")
    sizes = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_experts": 8,
        "moe_ffn_hidden_size": 48,
        "moe_layer_freq": [0, 1, 1],
    }
    layout = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    config = replace(config, megatron=replace(config.megatron, values={**config.megatron.values, **sizes, **layout}))
    assert config.cluster.world_size == 4
    experts = 2 * 8 * 3 * 64 * 48
    shared_state = config.cluster.world_size // config.megatron.model_parallel_size
    expected = 1000 * (4 + 4 + 8 / shared_state) + experts / 2 * (4 + 4 + 8 / 2)
    assert trainer_bytes(config, experts + 1000) == expected


def test_help_has_every_flag() -> None:
    text = help_text("train.py")
    assert [name for s in all_flag_specs() if s.form != "none" for name in s.names if name not in text] == []


def test_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run: python -m slime.config.reference > docs/flags.md"


def test_no_flag_of_ours_is_said_to_be_refused() -> None:
    refused = {line.split("`")[1] for line in reference_page().splitlines() if line.startswith("| `--sglang-")}
    assert "--sglang-tp-size" in refused
    assert "| `--sglang-config` | use" not in reference_page()


@pytest.mark.parametrize(
    ("files", "visible", "count"),
    [
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0"], "-1", 0),
        (["dxg"], None, 1),
        ([], None, 0),
    ],
)
def test_cuda_devices(tmp_path: Path, files: list[str], visible: str | None, count: int) -> None:
    for name in files:
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_cuda_devices(environment, tmp_path) == count
