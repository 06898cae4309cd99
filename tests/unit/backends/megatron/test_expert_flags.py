"""Mixture-of-experts flags: derived from the checkpoint, accepted as established scripts give them, refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron.args import namespace
from slime.errors import ConfigError
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config

TP_SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


def values(folder: Path, argv: Sequence[str] = (), **kwargs: Any) -> dict[str, Any]:
    return vars(namespace(make_config(folder, argv, **kwargs)))


def test_model_flags_come_from_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    expected = {
        "num_experts": 8,
        "moe_layer_freq": [1, 1],
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_topk": 2,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }
    found = values(folder)
    assert {name: found[name] for name in expected} == expected
    other = make_tiny_model(tmp_path, "qwen2_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    found = values(other)
    assert found["moe_layer_freq"] == [0, 1, 0, 0]
    assert found["moe_router_pre_softmax"]
    assert (found["moe_shared_expert_intermediate_size"], found["moe_shared_expert_gate"]) == (80, True)
    assert found["add_qkv_bias"]


def test_an_established_script_is_accepted_and_told_what_its_kernels_become(folder: Path) -> None:
    argv = (
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-layer-freq [1]*2 "
        "--moe-router-score-function softmax --moe-token-drop-policy probs --moe-token-dispatcher-type alltoall "
        "--moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0"
    )
    config = make_config(folder, argv.split())
    (grouped, fused) = config.megatron.notices
    assert grouped.startswith("--moe-grouped-gemm: experts run in torch's grouped matrix products on CUDA in bf16")
    assert fused == "--moe-permute-fusion has no effect: its kernel belongs to Transformer Engine"
    assert not config.megatron["moe_permute_fusion"]
    assert config.megatron["moe_grouped_gemm"]


def test_contradictions_are_reported_together(folder: Path) -> None:
    argv = "--num-experts 16 --moe-layer-freq [0]*1+[1]*1 --moe-router-pre-softmax --moe-router-topk 4"
    with pytest.raises(ConfigError) as caught:
        make_config(folder, argv.split())
    text = "\n".join(caught.value.problems)
    for part in (
        "--num-experts gives num_experts = 16",
        "--moe-layer-freq gives moe_layer_freq = [0, 1], but mlp_only_layers",
        "--moe-router-pre-softmax gives moe_router_pre_softmax = True, but norm_topk_prob",
        "--moe-router-topk gives moe_router_topk = 4, but num_experts_per_tok",
    ):
        assert part in text
    assert values(folder, ["--moe-layer-freq", "1"])["moe_layer_freq"] == 1


@pytest.mark.parametrize(
    ("argv", "processes", "words"),
    [
        (["--expert-model-parallel-size", "3"], 3, "--num-experts 8 cannot be split over"),
        (["--expert-model-parallel-size", "4"], 2, "--expert-model-parallel-size 4 x"),
        (TP_SP[:2], 2, "needs --sequence-parallel"),
        ([*TP_SP, "--expert-tensor-parallel-size", "5"], 10, "--moe-ffn-hidden-size 48 cannot be split over"),
        (["--moe-aux-loss-coeff", "0.01"], 1, "--moe-aux-loss-coeff 0.01"),
        (["--moe-z-loss-coeff", "0.01"], 1, "--moe-z-loss-coeff 0.01"),
        (["--moe-expert-capacity-factor", "1.5"], 1, "--moe-expert-capacity-factor 1.5"),
        (["--moe-router-load-balancing-type", "sinkhorn"], 1, "--moe-router-load-balancing-type sinkhorn"),
        (["--moe-token-dispatcher-type", "flex"], 1, "needs DeepEP"),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, argv: list[str], processes: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(folder, argv, num_processes=processes)
    assert any(words in problem for problem in caught.value.problems)


def test_expert_flags_on_a_dense_model(tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path, "llama")
    for argv, words in (
        (["--num-experts", "8"], "--num-experts gives num_experts = 8, but num_experts in"),
        (["--expert-model-parallel-size", "2"], "--expert-model-parallel-size 2 divides experts, and this model has"),
        (["--expert-tensor-parallel-size", "2"], "--expert-tensor-parallel-size 2 divides experts"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_config(dense, argv, num_processes=2)
        assert words in caught.value.problems[0]
    (notice,) = make_config(dense, ["--moe-grouped-gemm", "--moe-router-topk", "2"]).megatron.notices
    assert notice == "--moe-grouped-gemm, --moe-router-topk: no effect on a model without experts"


def test_shared_experts_are_split_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2_moe", shared_expert_intermediate_size=81)
    with pytest.raises(ConfigError, match="--moe-shared-expert-intermediate-size 81 cannot be split"):
        make_config(folder, TP_SP, num_processes=2)
