from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from slime.cli import LazyMegatronFamily, _router_family
from slime.config.engine_families import RECORDED_ROUTER, RECORDED_SGLANG, ArgparseFamily, strict_parser
from slime.config.engine_flags import SGLANG_ALIASES, SGLANG_DEFAULTS, SGLANG_FLAGS, SGLANG_OWNED, SGLANG_SECRETS
from slime.config.megatron_flags import MEGATRON_FLAGS
from slime.config.router_flags import ROUTER_FLAGS, ROUTER_OWNED, ROUTER_PRESETS, ROUTER_SECRETS
from slime.errors import ConfigError

# Engine flags that shipped commands use.
_SHIPPED = """
    mem-fraction-static cuda-graph-max-bs cuda-graph-max-bs-decode cuda-graph-bs max-running-requests
    enable-metrics ep-size dp-size enable-dp-attention enable-dp-lm-head moe-dense-tp-size moe-a2a-backend
    moe-runner-backend moe-dp-size deepep-mode speculative-algorithm speculative-num-steps
    speculative-eagle-topk speculative-num-draft-tokens speculative-draft-attention-backend attention-backend
    nsa-prefill-backend nsa-decode-backend dsa-prefill-backend dsa-decode-backend dsa-topk-backend
    watchdog-timeout page-size kv-cache-dtype disaggregation-transfer-backend disaggregation-ib-device
    tool-call-parser reasoning-parser mamba-scheduler-strategy enable-fp32-moe-router
    enable-deterministic-inference chunked-prefill-size max-prefill-tokens fp8-gemm-runner-backend dist-timeout
    disable-prefill-cuda-graph disable-piecewise-cuda-graph disable-overlap-schedule
    debug-tensor-dump-output-folder debug-tensor-dump-layers context-length
    log-level
"""


def test_shipped_engine_flags_are_known() -> None:
    assert {f"--sglang-{name}" for name in _SHIPPED.split()} <= RECORDED_SGLANG.flag_names()


def test_tables_are_consistent() -> None:
    assert not set(SGLANG_FLAGS) & set(SGLANG_OWNED)
    assert not set(ROUTER_FLAGS) & set(ROUTER_OWNED)
    assert set(SGLANG_ALIASES.values()) <= set(SGLANG_FLAGS)
    assert set(SGLANG_DEFAULTS) == set(SGLANG_FLAGS)
    assert {*ROUTER_PRESETS, *ROUTER_SECRETS} <= set(ROUTER_FLAGS)
    assert set(SGLANG_FLAGS) >= SGLANG_SECRETS


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (["--sglang-mem-fraction-static", "0.8"], {"mem_fraction_static": 0.8}),
        (["--sglang-enable-metrics"], {"enable_metrics": True}),
        (["--sglang-cuda-graph-bs", "1", "2"], {"cuda_graph_bs": [1, 2]}),
        (["--sglang-data-parallel-size", "2"], {"dp_size": 2}),
        (["--sglang-log-level", "INFO"], {"log_level": "INFO"}),
    ],
)
def test_recorded_values(group: list[str], expected: Mapping[str, Any]) -> None:
    assert RECORDED_SGLANG.parse([group]) == expected


def test_recorded_faults_are_reported_together() -> None:
    groups = [
        ["--sglang-mem-fraction-sttic", "1"],
        ["--sglang-page-size", "big"],
        ["--sglang-enable-metrics", "yes"],
        ["--sglang-page_size", "1"],
        ["--sglang-context-length"],
    ]
    with pytest.raises(ConfigError) as caught:
        RECORDED_SGLANG.parse(groups)
    assert len(caught.value.problems) == len(groups)
    assert "--sglang-mem-fraction-static" in caught.value.problems[0]
    assert "an integer, found 'big'" in caught.value.problems[1]


@pytest.fixture
def argparse_family() -> ArgparseFamily:
    parser = strict_parser()
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--policy", choices=["a"], default="a")
    parser.add_argument("--tp-size", type=int)
    parser.add_argument("--old-name")
    return ArgparseFamily(
        prefix="--x-",
        parser=parser,
        owned={"tp_size": "ours"},
        renamed={"old_name": "new_name"},
        choices={"policy": ("b",)},
    )


def test_argparse_family_returns_what_was_given_only(argparse_family: ArgparseFamily) -> None:
    assert argparse_family.parse([["--x-page-size", "3"]]) == {"page_size": 3}
    assert argparse_family.parse([["--x-old-name", "v"], ["--x-policy", "b"]]) == {"new_name": "v", "policy": "b"}
    assert argparse_family.flag_names() == {"--x-page-size", "--x-policy", "--x-old-name"}
    assert argparse_family.refused() == {"--x-tp-size": "ours"}


def test_argparse_faults_are_reported_together(argparse_family: ArgparseFamily) -> None:
    with pytest.raises(ConfigError) as caught:
        argparse_family.parse([["--x-page", "3"], ["--x-page-size", "big"], ["--x-policy", "a"], ["--x-page-size"]])
    first, second, third, fourth = caught.value.problems
    assert "unknown flag --x-page" in first  # an abbreviation
    assert "--x-page-size" in second
    assert "--x-policy" in third
    assert "expected one argument" in fourth


def test_the_installed_router_has_the_recorded_flags() -> None:
    pytest.importorskip("sglang_router")
    installed = _router_family()
    assert isinstance(installed, ArgparseFamily)
    recorded = {"--router-" + name.replace("_", "-") for name in ROUTER_FLAGS}
    renamed = {"--router-server-cert-path", "--router-server-key-path"}
    assert recorded - renamed <= installed.flag_names()
    groups = [["--router-policy", "consistent_hashing"], ["--router-cache-threshold", "0.5"]]
    assert installed.parse(groups) == RECORDED_ROUTER.parse(groups)


def test_recorded_megatron_names_are_used_with_the_recorded_version() -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    assert LazyMegatronFamily().flag_names() is MEGATRON_FLAGS


def test_what_a_foreign_parser_requires_is_not_asked_of_the_user() -> None:
    parser = strict_parser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--context-length", type=int)
    family = ArgparseFamily(prefix="--sglang-", parser=parser, owned={"model_path": "--hf-checkpoint"})
    assert family.parse([["--sglang-context-length", "8"]]) == {"context_length": 8}


def test_earlier_names_of_flags_are_read_as_present_ones() -> None:
    parser = strict_parser()
    parser.add_argument("--max-bs-decode", type=int)
    parser.add_argument("--graph-prefill", choices=["on", "disabled"])
    older = {"max-bs": ("max-bs-decode",), "no-graph": ("graph-prefill", "disabled"), "gone": ("not-there",)}
    family = ArgparseFamily(prefix="--sglang-", parser=parser, older=older)
    groups = [["--sglang-max-bs", "4"], ["--sglang-no-graph"]]
    assert family.parse(groups) == {"max_bs_decode": 4, "graph_prefill": "disabled"}
    assert "--sglang-gone" not in family.flag_names()
    with pytest.raises(ConfigError, match="--sglang-gone"):
        family.parse([["--sglang-gone", "1"]])
