from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, EvalDatasetConfig
from slime.config.schema import all_flag_specs
from slime.plugin_checks import HOOKS, Hook, check_plugins


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
    paths = {d for d in dests if d.endswith(("_path", "_hook"))} - no_plugins
    assert paths == hooks


def test_defaults_are_not_loaded() -> None:
    assert check_plugins(Config()) == []


def documented_functions(hook: Hook) -> list[tuple[str, str]]:
    """The row's own documented forms as Python: source and name."""
    found: list[tuple[str, str]] = []
    for form in hook.expected.split(" or "):
        if match := re.fullmatch(r"class with __init__\((.*)\)", form):
            found.append((f"class Given:\n    def __init__(self, {match[1]}): ...\n", "Given"))
        else:
            match = re.fullmatch(r"(async )?(\w+)(\(.*\))", form)
            assert match is not None, form
            found.append((f"{match[1] or ''}def {match[2]}{match[3]}: ...\n", match[2]))
    return found


@pytest.mark.parametrize("hook", HOOKS, ids=lambda h: h.dest)
def test_a_function_with_the_documented_signature_is_accepted(tmp_path: Path, hook: Hook) -> None:
    for number, (source, name) in enumerate(documented_functions(hook)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert problems(folder, hook.dest, source, name) == []


@pytest.mark.parametrize("hook", HOOKS, ids=lambda h: h.dest)
def test_a_function_without_arguments_is_refused(tmp_path: Path, hook: Hook) -> None:
    (problem,) = problems(tmp_path, hook.dest, "async def fn(): ...\n", "fn")
    assert hook.dest.replace("_", "-") in problem


def test_every_hook_says_what_it_is_called_with() -> None:
    assert [h.dest for h in HOOKS if h.kind == "other" and not h.required and not h.keywords] == []


@pytest.mark.parametrize(
    "parameters",
    [
        "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kw",
        "*, pg_loss, **kw",
        "args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths",
    ],
)
def test_keyword_hooks_may_take_the_rest_by_kwargs(tmp_path: Path, parameters: str) -> None:
    assert problems(tmp_path, "custom_tis_function_path", f"def fn({parameters}): ...\n") == []


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
