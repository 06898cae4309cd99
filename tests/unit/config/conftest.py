"""A model directory without weights worth loading, a prompt file, and a Megatron family that only splits flags."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, MegatronConfig, MegatronContext
from slime.config.draft import Surroundings
from slime.config.parse import parse
from slime.errors import ConfigError

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
}


def write_model(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3 if config is None else config))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))
    return folder


class FakeMegatron:
    """Knows a few flags; keeps their text."""

    NAMES = frozenset(
        {"--lr", "--bf16", "--fp16", "--tensor-model-parallel-size", "--num-layers", "--recompute-activations"}
        | {"--use-nccl-ub", "--optimizer-cuda-graph"}
    )

    def __init__(self) -> None:
        self.contexts: list[MegatronContext] = []

    def flag_names(self) -> frozenset[str]:
        return self.NAMES

    def parse(self, argv: Sequence[str], context: MegatronContext) -> MegatronConfig:
        self.contexts.append(context)
        values: dict[str, Any] = {}
        problems: list[str] = []
        for position, token in enumerate(argv):
            if token.startswith("--"):
                following = argv[position + 1 : position + 2]
                values[token[2:].replace("-", "_")] = following[0] if following else True
            elif token == "bad":
                problems.append(f"{argv[position - 1]}: bad value")
        if problems:
            raise ConfigError(problems)
        size = int(values.get("tensor_model_parallel_size", 1))
        return MegatronConfig(
            argv=tuple(argv), explicit=frozenset(values), values={**values, "tensor_model_parallel_size": size}
        )


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1 + 1?", "label": "2"}\n' * 40)
    return file


@pytest.fixture
def base_argv(model_dir: Path, prompts: Path) -> list[str]:
    """A command line with nothing to complain or remark about, apart from the missing GPU."""
    text = f"""
        --hf-checkpoint {model_dir} --prompt-data {prompts} --input-key prompt --label-key label --rm-type math
        --actor-num-gpus-per-node 2 --rollout-num-gpus 1 --rollout-batch-size 4 --n-samples-per-prompt 8
        --num-rollout 3 --rollout-max-response-len 16
    """
    return text.split()


Run = Callable[..., Config]


@pytest.fixture
def run(base_argv: list[str]) -> Run:
    """Parse ``base_argv`` plus further tokens (written as one string or a list)."""

    def call(extra: str | Sequence[str] = "", *, base: bool = True, **options: Any) -> Config:
        tokens = extra.split() if isinstance(extra, str) else list(extra)
        options.setdefault("megatron", FakeMegatron())
        return parse([*(base_argv if base else []), *tokens], **options)

    return call


@pytest.fixture
def problems(run: Run) -> Callable[..., list[str]]:
    """The problems of a command line that must be refused."""

    def call(extra: str | Sequence[str] = "", **options: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            run(extra, **options)
        return list(caught.value.problems)

    return call


@pytest.fixture
def cuda() -> Surroundings:
    return Surroundings(num_cuda_devices=8, sglang_installed=True, tensorboard_installed=True, start_time="t0")


def notices(config: Config) -> str:
    """What a resolved configuration tells its user, one remark a line."""
    return "\n".join(config.notices)
