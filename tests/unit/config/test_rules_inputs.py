"""Prompt files, graders, evaluation sets, engines and availability, by their effect on a command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from slime.config import Config
from slime.config.data_paths import parse_sliced_path
from slime.config.draft import Surroundings
from slime.config.rules.availability import AVAILABLE_VALUES, is_available
from slime.config.schema import all_flag_specs

from .conftest import Run, notices

Problems = Callable[..., list[str]]


# Inputs and rewards


def test_columns_that_the_data_makes_obvious(run: Run, model_dir: Path, prompts: Path) -> None:
    config = run(f"--hf-checkpoint {model_dir} --prompt-data {prompts} --num-rollout 1", base=False)
    assert (config.data.input_key, config.data.label_key, config.reward.rm_type) == ("prompt", "label", "math")
    for words in ("'prompt'", "'label'", "--rm-type math"):
        assert words in notices(config)


def test_named_columns_are_kept(run: Run) -> None:
    config = run("--input-key question --label-key answer")
    assert (config.data.input_key, config.data.label_key) == ("question", "answer")


def test_metadata_may_name_the_grader(run: Run, model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"input": "x", "metadata": {"rm_type": "f1"}}\n')
    config = run(f"--hf-checkpoint {model_dir} --prompt-data {file} --num-rollout 1", base=False)
    assert config.reward.rm_type is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rm-type mth", ["--rm-type mth", "did you mean math?", "deepscaler", "--custom-rm-path"]),
        ("--rm-type boxed_nothing", ["boxed_nothing", "f1"]),
        ("--rm-type remote_rm", ["--rm-url"]),
        ("--prompt-data prompts.jsonl", ["--prompt-data prompts.jsonl", "no such file"]),
        ("--prompt-data .", ["is a directory"]),
        ("--prompt-data README.md@[0:x]", ["path@[start:end]"]),
    ],
)
def test_input_faults(problems: Problems, flags: str, words: list[str]) -> None:
    (problem,) = problems(flags)
    assert all(word in problem for word in words), problem


def test_a_similar_file_is_suggested(problems: Problems, prompts: Path) -> None:
    (problem,) = problems(f"--prompt-data {prompts.with_name('promps.jsonl')}")
    assert str(prompts) in problem


@pytest.mark.parametrize("name", ["math", "boxed_math", " f1 ", "remote_rm --rm-url http://x"])
def test_known_graders(run: Run, name: str) -> None:
    tokens = ["--rm-type", *([name] if name.startswith(" ") else name.split())]
    assert run(tokens).reward.rm_type == name.split()[0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.jsonl", ("a.jsonl", slice(None))),
        ("a@b.jsonl", ("a@b.jsonl", slice(None))),
        ("a.jsonl@[0:10]", ("a.jsonl", slice(0, 10))),
        ("a.jsonl@[-5:]", ("a.jsonl", slice(-5, None))),
        ("a.jsonl@[:]", ("a.jsonl", slice(None))),
        ("a.jsonl@[-:]", ("a.jsonl@[-:]", slice(None))),
        ("a@[x]", ("a@[x]", slice(None))),
    ],
)
def test_slices(path: str, expected: tuple[str, slice]) -> None:
    assert parse_sliced_path(path) == expected


# Evaluation


def test_eval_interval_without_data_is_left_out_and_said(run: Run) -> None:
    config = run("--eval-interval 50")
    assert config.eval.eval_interval is None
    assert "--eval-interval 50 has no effect" in notices(config)


def test_eval_sets_accumulate_with_fallbacks(run: Run, prompts: Path) -> None:
    config = run(
        f"--eval-prompt-data one {prompts} --eval-prompt-data two {prompts}@[0:3] --eval-interval 2 "
        "--eval-temperature 0 --n-samples-per-eval-prompt 4 --rollout-top-p 1.0"
    )
    first, second = config.eval.eval_datasets
    assert (first.name, second.name) == ("one", "two")
    assert second.path.endswith("@[0:3]")
    assert (first.temperature, first.top_p, first.n_samples_per_eval_prompt) == (0, 1.0, 4)
    assert (first.input_key, first.label_key, first.max_response_len) == ("prompt", "label", 16)


def test_one_lone_eval_path_is_named_aime(run: Run, prompts: Path) -> None:
    config = run(f"--eval-prompt-data {prompts} --eval-interval 2")
    assert [d.name for d in config.eval.eval_datasets] == ["aime"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--eval-prompt-data a b c --eval-interval 1", "pairs NAME PATH, found 3"),
        ("--eval-prompt-data a nowhere.jsonl --eval-interval 1", "--eval-prompt-data nowhere.jsonl: no such file"),
        ("--eval-config nowhere.yaml --eval-interval 1", "--eval-config nowhere.yaml: cannot be read"),
        ("--eval-prompt-data a x.jsonl a y.jsonl --eval-interval 1", "the name a is given twice"),
    ],
)
def test_eval_faults(problems: Problems, flags: str, words: str) -> None:
    assert words in problems(flags)[0]


def test_group_rm_cannot_evaluate(problems: Problems, prompts: Path) -> None:
    assert "--group-rm" in problems(f"--eval-prompt-data a {prompts} --eval-interval 1 --group-rm")[0]


# Engines and availability


def test_engine_choice(run: Run, problems: Problems, cuda: Surroundings) -> None:
    assert run().engine.rollout_backend == "embedded"
    gpus = "--actor-num-gpus-per-node 4"
    assert run(gpus, surroundings=cuda).engine.rollout_backend == "sglang"
    without = replace(cuda, sglang_installed=False)
    assert run(gpus, surroundings=without).engine.rollout_backend == "embedded"
    assert run(surroundings=Surroundings(sglang_installed=True)).engine.rollout_backend == "embedded"
    assert "package sglang is not installed" in problems("--rollout-backend sglang")[0]
    assert "--sglang-router-port" in problems("--sglang-router-ip 1.2.3.4")[0]
    assert "--rollout-num-gpus-per-engine 2" in problems("--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2")[0]


def test_rows_of_the_availability_table_are_fields_and_accept_their_default() -> None:
    specs = {spec.dest: spec for spec in all_flag_specs()}
    assert set(AVAILABLE_VALUES) <= set(specs)
    assert [dest for dest in AVAILABLE_VALUES if not is_available(dest, specs[dest].default)] == []


_ON = [s.name for s in all_flag_specs() if s.dest in AVAILABLE_VALUES and s.form == "on"]
_CHOICES = [
    f"{s.name} {choice}"
    for s in all_flag_specs()
    if s.dest in AVAILABLE_VALUES and s.form == "value"
    for choice in s.choices or ()
    if not is_available(s.dest, choice)
]


@pytest.mark.parametrize("flags", _ON + _CHOICES)
def test_settings_with_nothing_behind_them_are_refused(problems: Problems, flags: str) -> None:
    found = [p for p in problems(flags) if "not available in this version" in p]
    assert len(found) == 1
    assert flags.split()[0] in found[0]


def test_defaults_of_unavailable_flags_may_be_written_out(run: Run) -> None:
    run("--update-weight-mode full --rollout-data-transport object-store --qwen-gdn-backend fla --lambd 1.0")


def test_every_section_reaches_the_config(run: Run) -> None:
    config = run()
    assert all(getattr(config, f.name) is not None for f in fields(Config) if f.name != "critic")
