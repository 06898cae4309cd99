from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, EvalDatasetConfig
from slime.config.schema import all_flag_specs
from slime.plugin_checks import HOOKS, check_plugins


def problems(tmp_path: Path, dest: str, text: str, name: str = "") -> list[str]:
    file = tmp_path / "hook.py"
    file.write_text(text)
    path = f"{file}:{name}" if name else str(file)
    spec = next(s for s in all_flag_specs() if s.dest == dest)
    value: Any = (path,) if spec.form == "append" else path
    section = replace(getattr(Config(), spec.section), **{dest: value})
    return check_plugins(replace(Config(), **{spec.section: section}))


def test_every_hook_is_a_flag_and_every_path_flag_is_a_hook() -> None:
    dests = {spec.dest for spec in all_flag_specs()}
    hooks = {hook.dest for hook in HOOKS}
    assert hooks <= dests
    no_plugins = {"custom_config_path", "megatron_config_path", "custom_rm_model_path"}
    not_available = {"custom_update_weight_post_write_path"}
    assert {d for d in dests if d.endswith("_path")} - no_plugins - not_available == hooks


def test_defaults_are_not_loaded() -> None:
    assert check_plugins(Config()) == []


@pytest.mark.parametrize("hook", [h for h in HOOKS if h.required and h.kind == "other"], ids=lambda h: h.dest)
def test_signatures_are_checked(tmp_path: Path, hook: Any) -> None:
    good = f"def fn({', '.join(hook.required)}, **kw): ...\n"
    assert problems(tmp_path / "", hook.dest, good) == []
    other = tmp_path / "other"
    other.mkdir()
    (problem,) = problems(other, hook.dest, f"def fn({', '.join(hook.required)}, one_more): ...\n")
    assert hook.dest.replace("_", "-") in problem
    assert hook.expected in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("async def custom_generate(args, samples, evaluation=False): ...", None),
        ("async def generate(args, sample, sampling_params): ...", None),
        ("def generate(args, sample, sampling_params): ...", "must be an async function"),
        ("async def generate(args, sample): ...", "does not fit"),
        ("async def other(args, samples): ...", "custom_generate or generate"),
    ],
)
def test_generate(tmp_path: Path, text: str, words: str | None) -> None:
    found = problems(tmp_path, "custom_generate_function_path", text)
    assert found == [] if words is None else words in found[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "class CustomRewardModel:\n def __init__(self, model_path): ...\n def compute_reward(self, p, r): ...",
            None,
        ),
        ("class CustomRewardModel:\n def __init__(self, model_path): ...", "no compute_reward"),
        ("async def custom_rm(args, sample, **kw): ...", None),
        ("def reward_func(args, samples): ...", None),
        ("async def custom_rm(args): ...", "does not fit"),
    ],
)
def test_reward(tmp_path: Path, text: str, words: str | None) -> None:
    found = problems(tmp_path, "custom_rm_path", text)
    assert found == [] if words is None else words in found[0]


def test_evaluation_sets_are_checked_too() -> None:
    dataset = EvalDatasetConfig(name="math", path="p", custom_rm_path="nowhere.py")
    config = replace(Config(), eval=replace(Config().eval, eval_datasets=(dataset,)))
    (problem,) = check_plugins(config)
    assert "evaluation set math" in problem
    assert "nowhere.py" in problem
