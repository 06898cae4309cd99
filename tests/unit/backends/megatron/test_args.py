"""Megatron's flags: strict parsing, derivation from the checkpoint, cross-checks, forced values."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron.args import MegatronFlagFamily, namespace
from slime.config import Config
from slime.errors import ConfigError
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def values(folder: Path, argv: Sequence[str] = (), **kwargs: Any) -> dict[str, Any]:
    return dict(make_config(folder, argv, **kwargs).megatron.values)


def problems(folder: Path, argv: Sequence[str], **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        make_config(folder, argv, **kwargs)
    return caught.value.problems


def test_flag_names_are_megatrons() -> None:
    names = MegatronFlagFamily().flag_names()
    assert {"--tensor-model-parallel-size", "--sequence-parallel", "--lr", "--no-rope-fusion"} <= names
    assert "--help" not in names
    assert all(name.startswith("--") for name in names)


def test_model_flags_come_from_the_checkpoint(folder: Path) -> None:
    found = values(folder)
    expected = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 32,
        "layernorm_epsilon": 1e-6,
        "rotary_base": 1000000,
        "vocab_size": 264,
        "padded_vocab_size": 384,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    assert {name: found[name] for name in expected} == expected


def test_defaults_that_slime_sets(folder: Path) -> None:
    found = values(folder, num_processes=2)
    expected = {
        "seed": 1234,
        "lr": 1e-6,
        "clip_grad": 1.0,
        "use_distributed_optimizer": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "transformer_impl": "local",
        "world_size": 2,
        "data_parallel_size": 2,
        "bf16": False,
        "params_dtype": "torch.float32",
        "ckpt_fully_parallel_load": True,
        "ckpt_assume_constant_structure": True,
    }
    assert {name: found[name] for name in expected} == expected
    given = values(folder, ["--lr", "0.5", "--seed", "7", "--clip-grad", "0"])
    assert (given["lr"], given["seed"], given["clip_grad"]) == (0.5, 7, 0.0)


def test_matching_model_flags_of_a_script_are_accepted(folder: Path) -> None:
    script = (
        "--swiglu --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
        "--group-query-attention --num-query-groups 2 --kv-channels 32 --use-rotary-position-embeddings "
        "--disable-bias-linear "
        "--normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 264 --qk-layernorm "
        "--untie-embeddings-and-output-weights"
    )
    assert values(folder, script.split()) == values(folder) | {"use_rotary_position_embeddings": True}


def test_every_contradiction_is_reported_at_once(folder: Path) -> None:
    argv = "--num-layers 3 --rotary-base 10000 --norm-epsilon 1e-5 --lr fast --tensor-model-parallel-siz 2"
    found = problems(folder, argv.split())
    assert len(found) == 5
    text = "\n".join(found)
    for part in (
        "--num-layers gives num_layers = 3, but num_hidden_layers",
        "--rotary-base gives",
        "--norm-epsilon gives layernorm_epsilon = 1e-05, but rms_norm_eps",
        "--lr: invalid float value: 'fast'",
        "--tensor-model-parallel-siz: not a Megatron flag",
    ):
        assert part in text


def test_sizes_that_do_not_fit_are_reported_by_flag(folder: Path) -> None:
    found = problems(folder, ["--tensor-model-parallel-size", "4"], num_processes=2)
    assert any("does not divide the 2 training processes" in p for p in found)
    assert any("--num-query-groups 2 cannot be split over --tensor-model-parallel-size 4" in p for p in found)
    assert "--sequence-parallel" in problems(folder, ["--sequence-parallel"])[0]
    assert "--attention-dropout 0.1" in problems(folder, ["--attention-dropout", "0.1"])[0]


@pytest.mark.parametrize("own", [True, False])
def test_routing_replay_needs_experts(folder: Path, own: bool) -> None:
    algorithm = {"use_routing_replay": True, "use_rollout_routing_replay": not own}
    flag = "--use-routing-replay" if own else "--use-rollout-routing-replay"
    assert problems(folder, [], algorithm=algorithm) == (
        f"{flag} needs a model with experts; this one has none (--num-experts)",
    )


def test_what_megatron_refuses_is_a_config_error(folder: Path) -> None:
    (found,) = problems(folder, ["--num-layers-per-virtual-pipeline-stage", "1"])
    assert found.startswith("Megatron refuses these flags: ")


def test_rope_scaling_of_llama3(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", rope_scaling=LLAMA3)
    found = values(folder)
    assert (found["use_rope_scaling"], found["rope_scaling_factor"]) == (True, 32.0)
    assert values(folder, ["--use-rope-scaling", "--rotary-scaling-factor", "32.0"])["rope_scaling_factor"] == 32.0
    (problem,) = problems(folder, ["--use-rope-scaling", "--rotary-scaling-factor", "8.0"])
    assert problem.startswith("--rotary-scaling-factor gives rope_scaling_factor = 8.0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' cannot be trained yet; supported: deepseek_v3, glm4_moe"),
    ],
)
def test_checkpoints_that_would_train_wrongly_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = make_tiny_model(tmp_path, "qwen3")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert words in problems(folder, [])[0]


def test_the_number_of_rollouts_may_be_unknown(folder: Path) -> None:
    assert values(folder, data={"num_rollout": None, "num_epoch": 1})["train_iters"] is None


def test_precision(folder: Path) -> None:
    found = values(folder, train={"precision": "bf16"})
    assert (found["bf16"], found["params_dtype"]) == (True, "torch.bfloat16")
    assert found["accumulate_allreduce_grads_in_fp32"]


def test_nothing_is_left_behind(folder: Path) -> None:
    before = dict(os.environ), torch.are_deterministic_algorithms_enabled(), logging.root.manager.disable
    make_config(folder, ["--deterministic-mode"], num_processes=1)
    assert before == (dict(os.environ), torch.are_deterministic_algorithms_enabled(), logging.root.manager.disable)


def test_a_namespace_survives_json_and_pickle(folder: Path) -> None:
    config = make_config(folder, ["--attention-backend", "flash"], train={"precision": "bf16"})
    again = Config.from_json(config.to_json())
    assert again == config
    assert pickle.loads(pickle.dumps(config)) == config
    args = namespace(again)
    assert args.params_dtype is torch.bfloat16
    assert args.attention_backend.name == "flash"
    assert namespace(config) == args
