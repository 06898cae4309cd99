"""The table of engine flags against the embedded server's own parser, and what a command line is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from slime.cluster.engine_commands import flags_of
from slime.config.embedded_flags import (
    EMBEDDED_COUNTS,
    EMBEDDED_USED,
    EMBEDDED_VALUES,
    EMBEDDED_WITHOUT_EFFECT,
    embedded_values,
)
from slime.config.engine_flags import SGLANG_FLAGS
from slime.engines.embedded.flags import ServerFlags, parse_flags
from slime.errors import ConfigError

from .conftest import Run

Problems = Callable[..., list[str]]


def accepts(values: dict[str, Any]) -> bool:
    try:
        parse_flags(["--model-path", "m", *flags_of(values)])
    except ConfigError:
        return False
    return True


def sample(name: str) -> Any:
    if name in EMBEDDED_VALUES:
        return EMBEDDED_VALUES[name][1]
    return {"flag": True, "int": 8, "float": 0.5, "str": "text"}[SGLANG_FLAGS[name]]


def test_used_flags_are_those_that_the_server_reads() -> None:
    fields_of_server = {field.name for field in fields(ServerFlags)}
    # The seed of each request makes it deterministic; the server has nothing to switch.
    assert fields_of_server & set(SGLANG_FLAGS) == EMBEDDED_USED - {"enable_deterministic_inference"}
    assert set(SGLANG_FLAGS) >= EMBEDDED_WITHOUT_EFFECT
    assert not EMBEDDED_USED & EMBEDDED_WITHOUT_EFFECT


@pytest.mark.parametrize("name", sorted(EMBEDDED_USED))
def test_the_server_accepts_what_the_table_lets_through(name: str) -> None:
    assert accepts({name: sample(name)})


def test_values_are_those_of_the_server() -> None:
    for name, choices in EMBEDDED_VALUES.items():
        assert [c for c in choices if c != "cuda" and not accepts({name: c})] == []
        assert not accepts({name: "other"})
    assert [name for name in EMBEDDED_COUNTS if accepts({name: 0})] == []


def test_flags_without_effect_are_said_once_and_do_not_reach_the_server(run: Run) -> None:
    config = run(
        "--sglang-mem-fraction-static 0.7 --sglang-cuda-graph-max-bs 16 --sglang-cuda-graph-bs 1 2 "
        "--sglang-enable-metrics --sglang-max-running-requests 64 --sglang-attention-backend fa3 "
        "--sglang-log-level INFO --sglang-chunked-prefill-size 4096 --sglang-dp-size 1"
    )
    (notice,) = [n for n in config.notices if "no effect on the embedded engine" in n]
    assert notice == (
        "--sglang-cuda-graph-max-bs, --sglang-cuda-graph-bs, --sglang-enable-metrics, --sglang-attention-backend "
        "have no effect on the embedded engine"
    )
    assert embedded_values(config.sglang) == {
        "mem_fraction_static": 0.7,
        "max_running_requests": 64,
        "log_level": "INFO",
        "chunked_prefill_size": 4096,
    }


def test_what_would_change_results_is_refused_in_one_report(problems: Problems) -> None:
    found = problems(
        "--sglang-quantization fp8 --sglang-speculative-algorithm EAGLE --sglang-enable-lora --sglang-api-key hush "
        "--sglang-dp-size 2 --sglang-log-level loud --sglang-chunked-prefill-size -1 --sglang-mem-fraction-static 2 "
        "--sglang-enable-metrics"
    )
    flags = ["--sglang-quantization fp8", "--sglang-speculative-algorithm EAGLE", "--sglang-enable-lora",
             "--sglang-api-key", "--sglang-dp-size 2", "--sglang-log-level loud", "--sglang-chunked-prefill-size -1",
             "--sglang-mem-fraction-static 2"]  # fmt: skip
    assert len(found) == len(flags)
    assert [f for f, problem in zip(flags, found, strict=True) if not problem.startswith(f + ":")] == []
    assert "hush" not in "".join(found)


def test_no_flag_is_left_for_the_server_to_refuse(run: Run) -> None:
    shown = {"flag": "", "pair": "", "int": "3", "float": "0.5", "int*": "3", "float*": "0.5", "json": "{}"}
    accepted: set[str] = set()
    for name, kind in SGLANG_FLAGS.items():
        value = EMBEDDED_VALUES.get(name, ("text",))[0] if kind.startswith("str") else shown[kind]
        try:
            config = run(["--sglang-" + name.replace("_", "-"), *([value] if value else [])])
        except ConfigError:
            continue
        accepted.add(name)
        assert accepts(embedded_values(config.sglang)), name
    assert accepted >= EMBEDDED_USED | EMBEDDED_WITHOUT_EFFECT


def test_without_engines_nothing_is_checked(run: Run) -> None:
    assert run("--debug-train-only --sglang-quantization fp8").sglang == {"quantization": "fp8"}
