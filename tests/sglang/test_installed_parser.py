"""The recorded tables of SGLang's flags against the parser of the installed version."""

from __future__ import annotations

import argparse

import pytest

from slime.cli import _engine_family
from slime.cluster.sglang_command import sglang_flags
from slime.config.engine_families import ArgparseFamily, strict_parser
from slime.config.engine_flags import SGLANG_ALIASES, SGLANG_FLAGS, SGLANG_OWNED
from slime.config.sglang_names import SGLANG_OLDER, SGLANG_OPTIONS
from slime.errors import ConfigError


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = strict_parser()
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        action.required = False
    return parser


@pytest.fixture(scope="module")
def family() -> ArgparseFamily:
    found = _engine_family(["--sglang-context-length", "8"])
    assert isinstance(found, ArgparseFamily)
    return found


def test_every_flag_is_recorded(parser: argparse.ArgumentParser) -> None:
    recorded = {*SGLANG_FLAGS, *SGLANG_OWNED, *SGLANG_ALIASES.values()}
    dests = {action.dest for action in parser._actions if action.option_strings}
    assert dests - recorded - {"help"} == set()


def test_every_attribute_can_be_written_as_a_flag(parser: argparse.ArgumentParser) -> None:
    dests = {action.dest: action for action in parser._actions if action.option_strings and action.dest != "help"}
    accepted = {option: action.dest for action in parser._actions for option in action.option_strings}
    for dest, action in dests.items():
        value = True if action.nargs == 0 else "x"
        option = sglang_flags({dest: value})[0]
        assert accepted.get(option) == dest, option
    assert set(SGLANG_OPTIONS) <= set(dests)


def test_flags_with_both_forms_can_be_turned_off(parser: argparse.ArgumentParser) -> None:
    pairs = [a.dest for a in parser._actions if isinstance(a, argparse.BooleanOptionalAction)]
    assert len(pairs) > 5
    for dest in pairs:
        tokens = sglang_flags({dest: False})
        assert getattr(parser.parse_args(tokens), dest) is False, tokens


def test_earlier_names_lead_to_present_ones(parser: argparse.ArgumentParser) -> None:
    options = {option for action in parser._actions for option in action.option_strings}
    assert {f"--{present}" for present, *_ in SGLANG_OLDER.values()} <= options


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (["--sglang-cuda-graph-max-bs", "16"], {"cuda_graph_max_bs_decode": 16}),
        (["--sglang-cuda-graph-bs", "1", "2"], {"cuda_graph_bs_decode": [1, 2]}),
        (["--sglang-fp8-gemm-runner-backend", "triton"], {"fp8_gemm_runner_backend": "triton"}),
        (["--sglang-mem-fraction-static", "0.7"], {"mem_fraction_static": 0.7}),
        (["--sglang-data-parallel-size", "2"], {"dp_size": 2}),
    ],
)
def test_values_that_scripts_give(family: ArgparseFamily, group: list[str], expected: dict[str, object]) -> None:
    assert family.parse([group]) == expected


def test_wrong_values_and_names_are_reported_together(family: ArgparseFamily) -> None:
    groups = [["--sglang-contxt-length", "8"], ["--sglang-context-length", "many"]]
    with pytest.raises(ConfigError) as caught:
        family.parse(groups)
    assert "--sglang-context-length" in caught.value.problems[0]  # the nearest name
    assert "many" in caught.value.problems[1]
