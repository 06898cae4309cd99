from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.config.eval_datasets import (
    EvalDatasetConfig,
    build_eval_dataset_configs,
    ensure_dataset_list,
    pairs_from_flag,
    read_eval_file,
)
from slime.errors import ConfigError

CHAINS: dict[str, tuple[str, ...]] = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "min_new_tokens": ("eval_min_new_tokens",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "custom_rm_path": ("eval_custom_rm_path", "custom_rm_path"),
}
ALL_FLAGS = {name for chain in CHAINS.values() for name in chain} | {
    "rollout_stop", "rollout_stop_token_ids", "multimodal_keys", "apply_chat_template", "apply_chat_template_kwargs",
}  # fmt: skip


def flags(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**(dict.fromkeys(ALL_FLAGS) | given))


def build(raw: dict[str, Any], defaults: dict[str, Any] | None = None, **given: Any) -> EvalDatasetConfig:
    (dataset,) = build_eval_dataset_configs(flags(**given), [{"name": "n", "path": "p", **raw}], defaults or {})
    return dataset


@pytest.mark.parametrize("key", CHAINS)
def test_precedence(key: str) -> None:
    """The set's own entry, then defaults, then the flags of the chain in order."""
    chain = CHAINS[key]
    given = {name: position + 10 for position, name in enumerate(chain)}
    assert getattr(build({key: 1}, {key: 2}, **given), key) == 1
    assert getattr(build({}, {key: 2}, **given), key) == 2
    assert getattr(build({}, **given), key) == 10
    if len(chain) > 1:
        assert getattr(build({}, **{chain[1]: 11}), key) == 11


def test_stop_settings() -> None:
    dataset = build({}, rollout_stop=("a",), rollout_stop_token_ids=(1, 2))
    assert (dataset.stop, dataset.stop_token_ids) == (("a",), (1, 2))
    assert build({"stop": "x"}).stop == ("x",)


@pytest.mark.parametrize(
    ("raw", "defaults", "words"),
    [
        ({"temprature": 1}, {}, "evaluation set n: unknown key temprature"),
        ({}, {"temprature": 1}, "evaluation defaults: unknown key temprature"),
        ({}, {"path": "x"}, "unknown key path"),
        ({"path": ""}, {}, "path is missing"),
        ({"min_eval_samples": 0}, {}, "min_eval_samples must be > 0"),
        ({"n_samples_per_eval_prompt": 0}, {}, "at least 1"),
    ],
)
def test_faults(raw: dict[str, Any], defaults: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(raw, defaults)


def test_cache_key_changes_with_what_is_read_not_with_sampling() -> None:
    base = build({})
    assert hash(base.cache_key) == hash(build({"temperature": 0.5}).cache_key)
    assert base.cache_key != build({"input_key": "x"}).cache_key
    assert base.cache_key != build({"apply_chat_template_kwargs": {"a": 1}}).cache_key


def test_inject_metadata_copies_and_overrides() -> None:
    row = {"a": 1, "rm_type": "f1"}
    assert build({"rm_type": "math", "metadata_overrides": {"b": 2}}).inject_metadata(row) == {
        "a": 1,
        "b": 2,
        "rm_type": "math",
    }
    assert row == {"a": 1, "rm_type": "f1"}
    assert build({}).inject_metadata(None) == {}


def test_dataset_lists() -> None:
    assert ensure_dataset_list({"a": "x", "b": {"path": "y"}}) == [
        {"name": "a", "path": "x"},
        {"name": "b", "path": "y"},
    ]
    assert ensure_dataset_list([{"name": "a", "path": "x"}]) == [{"name": "a", "path": "x"}]
    for wrong in ("x", ["x"], 3):
        with pytest.raises(ConfigError):
            ensure_dataset_list(wrong)


def test_pairs() -> None:
    assert pairs_from_flag(["p"]) == [{"name": "aime", "path": "p"}]
    assert pairs_from_flag(["a", "p", "b", "q"]) == [{"name": "a", "path": "p"}, {"name": "b", "path": "q"}]
    with pytest.raises(ConfigError, match="found 3"):
        pairs_from_flag(["a", "p", "b"])


@pytest.mark.parametrize("indent", ["", "eval:"])
def test_file_with_and_without_root_key(tmp_path: Path, indent: str) -> None:
    body = "defaults: {temperature: 0.5}\ndatasets:\n- {name: a, path: x}\n"
    file = tmp_path / "e.yaml"
    file.write_text(body if not indent else "eval:\n" + "".join(f"  {line}\n" for line in body.splitlines()))
    assert read_eval_file(str(file)) == ({"temperature": 0.5}, [{"name": "a", "path": "x"}])


@pytest.mark.parametrize("text", ["", "[]", "defaults: {}", "a: ["])
def test_unusable_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--eval-config"):
        read_eval_file(str(file))
