"""Engines that already run: what is asked of them, and what must fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.config.draft import Surroundings
from slime.config.engine_plan import plan_engines
from slime.config.external import ExternalEngine, external_url, is_address, read_external
from slime.config.plan import plan_text
from slime.config.schema import Config
from slime.errors import EngineError, SlimeError

from .conftest import Run

Problems = Callable[..., list[str]]


@pytest.fixture
def line(base_argv: list[str]) -> list[str]:
    """The base command line lets the engines say how many GPUs they have."""
    at = base_argv.index("--rollout-num-gpus")
    del base_argv[at : at + 2]
    return base_argv


def around(infos: Mapping[str, Mapping[str, Any]]) -> Surroundings:
    def query(urls: Sequence[str]) -> list[Mapping[str, Any] | SlimeError]:
        return [infos.get(url, EngineError(f"{url} cannot be reached: refused")) for url in urls]

    return Surroundings(query_engines=query)


def info(model: Path | str, **more: Any) -> dict[str, Any]:
    return {"model_path": str(model), "tp_size": 1, "pp_size": 1, "dp_size": 1, "version": "0.5.23", **more}


FLAG = "--rollout-external-engine-addrs a:1 http://b:2"


def test_engines_of_different_sizes_say_how_many_gpus_generate(line: list[str], run: Run, model_dir: Path) -> None:
    infos = {"http://a:1": info(model_dir, tp_size=4), "http://b:2": info(model_dir, tp_size=2)}
    config = run(FLAG, surroundings=around(infos))
    assert config.cluster.rollout_num_gpus == 6
    assert config.num_engines == 2
    assert config.engine.rollout_backend == "sglang"
    assert config.layout.rollout == ()
    assert [(e.url, e.num_gpus, e.worker_type) for e in config.external_engines] == [
        ("http://a:1", 4, "regular"),
        ("http://b:2", 2, "regular"),
    ]
    plan = plan_engines(config)
    assert plan.engines == ()
    assert not plan.default_router.disaggregated
    assert Config.from_json(config.to_json()) == config
    assert "engine that runs already: sglang, http://a:1, regular, 4 GPU(s)" in plan_text(config)


def test_prefill_and_decode_engines_make_a_disaggregated_router(line: list[str], run: Run, model_dir: Path) -> None:
    prefill = info(model_dir, disaggregation_mode="prefill", disaggregation_bootstrap_port=9000)
    infos = {"http://a:1": prefill, "http://b:2": info(model_dir, disaggregation_mode="decode")}
    config = run(FLAG, surroundings=around(infos))
    assert config.external_engines[0].bootstrap_port == 9000
    assert plan_engines(config).default_router.disaggregated


def test_all_that_does_not_fit_is_told_together(line: list[str], problems: Problems, model_dir: Path) -> None:
    infos = {
        "http://a:1": info("/models/other", context_length=512, dtype="bfloat16"),
        "http://b:2": info(model_dir, context_length=1024, dtype="float32"),
    }
    flags = f"{FLAG} --rollout-num-gpus 3 --rollout-num-gpus-per-engine 2 --sglang-context-length 1024"
    found = "\n".join(problems(f"{flags} --sglang-dtype float32", surroundings=around(infos)))
    assert "--rollout-num-gpus 3: the engines of --rollout-external-engine-addrs have 2" in found
    assert "--rollout-num-gpus-per-engine 2: http://a:1 has 1" in found
    assert "http://a:1 does not fit this command line: it serves /models/other, --hf-checkpoint is" in found
    assert "it has context_length 512, --sglang-context-length is 1024; it has dtype bfloat16" in found
    assert "http://b:2 does not fit" not in found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rollout-external-engine-addrs c:3", "-addrs: http://c:3 cannot be reached: refused; start it first"),
        ("--rollout-external-engine-addrs a:1 a:1", "names http://a:1 2 times"),
        (f"{FLAG} --colocate", "--colocate exclude each other"),
        (f"{FLAG} --prefill-num-servers 1", "exclude each other"),
        (f"{FLAG} --rollout-backend embedded", "the engines of --rollout-external-engine-addrs are sglang"),
        (f"{FLAG} --use-rollout-routing-replay", "it returns no routed experts"),
        (
            "--rollout-external-engine-addrs localhost:abc",
            "--rollout-external-engine-addrs localhost:abc: not HOST:PORT (port 1 to 65535), optionally with http://",
        ),
    ],
)
def test_faults(line: list[str], problems: Problems, model_dir: Path, flags: str, words: str) -> None:
    infos = {"http://a:1": info(model_dir), "http://b:2": info(model_dir)}
    found = problems(flags, surroundings=around(infos))
    assert any(words in problem for problem in found), found


def test_engines_of_two_kinds_and_halves_of_a_disaggregation(
    line: list[str], problems: Problems, model_dir: Path
) -> None:
    infos = {"http://a:1": info(model_dir, engine="embedded"), "http://b:2": info(model_dir)}
    assert any("different kinds" in problem for problem in problems(FLAG, surroundings=around(infos)))
    half = {"http://a:1": info(model_dir, disaggregation_mode="decode"), "http://b:2": info(model_dir)}
    assert any("need each other" in problem for problem in problems(FLAG, surroundings=around(half)))


def test_an_answer_without_what_is_needed() -> None:
    with pytest.raises(ValueError, match="model_path"):
        read_external("http://a:1", {"tp_size": 1})
    assert read_external("u", info("m", engine="embedded")) == ExternalEngine(
        url="u", backend="embedded", num_gpus=1, worker_type="regular", model_path="m"
    )
    assert (external_url("h:1"), external_url("https://h/x/")) == ("http://h:1", "https://h/x")


@pytest.mark.parametrize("text", ["h:1", "10.0.0.1:65535", "http://h:8000", "https://h.example:443/", "[::1]:30000"])
def test_addresses(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize("text", ["h", "h:", ":1", "h:0", "h:65536", "ftp://h:1", "http://h", "u@h:1", "::1:3"])
def test_what_is_no_address(text: str) -> None:
    assert not is_address(text)


def test_weights_reach_an_engine_of_several_stages_by_disk_only(
    line: list[str], run: Run, problems: Problems, model_dir: Path
) -> None:
    infos = {"http://a:1": info(model_dir, tp_size=2, pp_size=2)}
    flags = "--rollout-external-engine-addrs a:1"
    (problem,) = problems(flags, surroundings=around(infos))
    assert problem.startswith("http://a:1: engines of several pipeline stages take weights from disk only")
    run(f"{flags} --update-weight-transport disk --update-weight-disk-dir shared", surroundings=around(infos))


def test_nobody_is_asked_when_nothing_is_generated(line: list[str], run: Run) -> None:
    config = run(f"{FLAG} --debug-train-only", surroundings=around({}))
    assert config.external_engines == ()
