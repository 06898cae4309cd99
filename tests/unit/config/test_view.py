from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from slime.cluster.router import router_values
from slime.config import ArgsView, Config
from slime.config.engine_flags import SGLANG_FLAGS
from slime.config.router_flags import ROUTER_PRESETS
from slime.config.schema import all_flag_specs

from .conftest import Run


def test_every_flag_has_its_established_name() -> None:
    args = ArgsView(Config())
    for spec in all_flag_specs():
        assert getattr(args, spec.dest) == getattr(getattr(Config(), spec.section), spec.dest)


def test_engine_attributes_always_exist(run: Run) -> None:
    args = ArgsView(Config())
    assert all(f"sglang_{name}" in args for name in SGLANG_FLAGS)
    assert args.sglang_speculative_algorithm is None
    given = ArgsView(replace(run("--router-policy random"), sglang={"dp_size": 2, "speculative_algorithm": "EAGLE"}))
    assert (given.sglang_dp_size, given.sglang_data_parallel_size) == (2, 2)
    assert given.sglang_speculative_algorithm == "EAGLE"
    assert (given.router_policy, given.router_log_level) == ("random", "warn")


def test_megatron_values_and_counts(run: Run) -> None:
    args = ArgsView(run("--lr 0.5"))
    assert args.lr == "0.5"
    assert (args.world_size, args.rollout_num_engines, args.use_critic) == (2, 1, False)


def test_unknown_names_are_attribute_errors_that_say_which() -> None:
    args = ArgsView(Config())
    with pytest.raises(AttributeError, match="my_flag"):
        _ = args.my_flag
    assert getattr(args, "my_flag", 3) == 3
    assert not hasattr(args, "my_flag")


def test_it_is_read_only() -> None:
    args = ArgsView(Config())
    with pytest.raises(AttributeError, match="read-only"):
        args.colocate = True
    with pytest.raises(AttributeError, match="read-only"):
        del args.colocate


def test_facts_are_set_once_and_win() -> None:
    args = ArgsView(Config())
    known = args.with_facts(sglang_router_ip="1.2.3.4", sglang_router_port=3)
    assert (known.sglang_router_ip, args.sglang_router_ip) == ("1.2.3.4", None)
    assert known.with_facts(extra=1).sglang_router_port == 3
    with pytest.raises(ValueError, match="sglang_router_ip"):
        known.with_facts(sglang_router_ip="other")


def test_it_can_be_copied_and_pickled() -> None:
    args = ArgsView(Config()).with_facts(fact=1)
    for twin in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert twin.to_dict() == args.to_dict()
        assert twin.config == args.config


def test_custom_entries_win_over_defaults(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max_turns: 7\nanything: x\n")
    args = ArgsView(run(f"--custom-config-path {file}"))
    assert (args.max_turns, args.anything) == (7, "x")
    assert "anything" in dir(args)


def test_router_attributes_are_what_the_router_is_told(run: Run) -> None:
    for flags in ("", "--router-policy cache_aware --router-balance-abs-threshold 3"):
        config = run(flags)
        args = ArgsView(config)
        told = router_values(config, host="127.0.0.1", port=1, prometheus_port=2)
        assert {n: getattr(args, f"router_{n}") for n in ROUTER_PRESETS} == {n: told[n] for n in ROUTER_PRESETS}
    assert args.router_policy == "cache_aware"
    assert ArgsView(Config()).router_policy == "round_robin"
