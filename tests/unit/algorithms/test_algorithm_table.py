"""The table of algorithms and options cannot go stale, and the recipes of its page are command lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.algorithms import ALGORITHMS
from slime.config.flags import flag_specs
from slime.config.sections import AlgorithmConfig, RewardConfig
from tests.parallel import algorithm_table
from tests.unit.config.conftest import Run, base_argv, model_dir, prompts, run  # noqa: F401  fixtures

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"### ([^\n]+)\n(?:(?!###).)*?```bash\n(.*?)```", PAGE, flags=re.DOTALL))


def test_every_algorithm_and_option_has_a_row_with_a_test_that_exists() -> None:
    assert algorithm_table.problems() == []


def test_flags_without_a_formula_are_flags() -> None:
    assert set(algorithm_table.NOT_FORMULAS) <= {spec.dest for spec in flag_specs(AlgorithmConfig, "algorithm")}


def test_what_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_table, "ESTIMATORS", algorithm_table.ESTIMATORS[1:])
    monkeypatch.setattr(algorithm_table, "OPTIONS", algorithm_table.OPTIONS[1:])
    assert algorithm_table.problems() == ["no row for the estimator grpo", "no row for the flag loss_type"]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("tests/unit/nowhere.py::test_a", "does not exist"),
        ("tests/unit/algorithms/test_reference.py::test_nothing", "has no test test_nothing"),
        ("tests/unit/algorithms/test_reference.py::test_objective[no_such_name]", "no such parameter"),
    ],
)
def test_a_test_that_does_not_exist_is_found(node: str, words: str) -> None:
    assert words in (algorithm_table.reference_problem(node) or "")


def test_the_table_names_every_flag_as_it_is_written() -> None:
    text = algorithm_table.table()
    assert "--disable-grpo-std-normalization" in text
    assert all(name in text for name in ALGORITHMS)


def test_the_page_explains_every_estimator_and_every_flag_of_the_table() -> None:
    names = {spec.dest: spec.name for section in (AlgorithmConfig, RewardConfig) for spec in flag_specs(section, "")}
    flags = {names[dest] for row in algorithm_table.OPTIONS for dest in row.names}
    assert sorted(flag for flag in flags if f"`{flag}" not in PAGE) == []
    assert sorted(name for name in ALGORITHMS if f"`{name}`" not in PAGE) == []


def test_recipes() -> None:
    assert list(RECIPES) == ["GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "RLOO", "REINFORCE++", "PPO"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_command_line(name: str, run: Run) -> None:  # noqa: F811
    tokens = [token for token in RECIPES[name].split() if token != "\\"]
    config = run(tokens)
    assert not [notice for notice in config.notices if "no effect" in notice or "does not enter" in notice]
