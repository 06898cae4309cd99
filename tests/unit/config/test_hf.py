from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from slime.config.hf import count_parameters, normalize_config, read_hf_model
from slime.errors import ConfigError


def refused(path: Path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_hf_model(str(path))
    return caught.value.problems


def test_reads_a_good_directory(model_dir: Path) -> None:
    model = read_hf_model(str(model_dir))
    assert model.model_type == "qwen3"
    assert model.architectures == ("Qwen3ForCausalLM",)
    assert (model["head_dim"], model["rope_theta"], model.get("nothing", 7)) == (8, 1e6, 7)


def test_absent_directory(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path / "nowhere")
    assert "--hf-checkpoint" in problem
    assert "no such directory" in problem


def test_file_instead_of_directory(model_dir: Path) -> None:
    assert "is a file" in refused(model_dir / "config.json")[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no config.json"),
        ("{not json", "not JSON"),
        ("[]", "model_type"),
        ("{}", "model_type"),
        ("\udcff", "JSON"),
    ],
)
def test_bad_config(model_dir: Path, content: str | None, words: str) -> None:
    file = model_dir / "config.json"
    file.unlink() if content is None else file.write_text(content, errors="surrogateescape")
    (problem,) = refused(model_dir)
    assert words.split()[-1] in problem or "not text" in problem
    assert str(model_dir) in problem


def test_all_faults_of_a_directory_are_reported(model_dir: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model_dir / name).unlink()
    (model_dir / "pytorch_model.bin").write_bytes(b"")
    text = "\n".join(refused(model_dir))
    assert "config.json" in text
    assert "only pytorch_model.bin" in text
    assert "no tokenizer" in text


def test_truncated_weights(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"\x10\x00\x00")
    assert "not a readable safetensors file" in refused(model_dir)[0]


def test_missing_shard(model_dir: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 of 2 weight files are missing, the first is model-00002.safetensors" in refused(model_dir)[0]


def test_count_parameters_sums_shapes_over_files(tmp_path: Path) -> None:
    for name, shape in (("a", [3, 5]), ("b", [7])):
        entry = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}, "__metadata__": {"format": "pt"}}
        header = json.dumps(entry).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert count_parameters(str(tmp_path)) == 22


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({"rope_theta": 5.0}, 5.0, None),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, 5.0, None),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "llama3", "factor": 8.0}},
            5.0,
            {"rope_type": "llama3", "factor": 8.0},
        ),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            5.0,
            {"rope_type": "yarn", "factor": 4.0},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0, "rope_type": "default"}}},
            7.0,
            None,
        ),
        ({}, None, None),
    ],
)
def test_rope_has_one_spelling(config: dict[str, Any], theta: float | None, scaling: dict[str, Any] | None) -> None:
    normal = normalize_config({"model_type": "llama", **config})
    assert (normal["rope_theta"], normal["rope_scaling"]) == (theta, scaling)


def test_defaults_of_the_text_model() -> None:
    config = {
        "model_type": "outer",
        "text_config": {"model_type": "inner", "hidden_size": 64, "num_attention_heads": 4},
    }
    normal = normalize_config(config)
    assert normal["model_type"] == "outer"
    assert (normal["head_dim"], normal["num_key_value_heads"]) == (16, 4)
    assert config == {
        "model_type": "outer",
        "text_config": {"model_type": "inner", "hidden_size": 64, "num_attention_heads": 4},
    }


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_embeddings_are_untied_where_the_family_says_so(model_type: str) -> None:
    """The model library's classes default to untied embeddings, its base configuration to tied ones."""
    assert normalize_config({"model_type": model_type})["tie_word_embeddings"] is False
    assert normalize_config({"model_type": model_type, "tie_word_embeddings": True})["tie_word_embeddings"] is True
    assert normalize_config({"model_type": "something"})["tie_word_embeddings"] is True
