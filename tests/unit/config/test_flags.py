from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from slime.config.flags import Section, derived, flag, flag_specs
from slime.config.schema import SECTIONS, Config, all_flag_specs
from slime.errors import ConfigError


def test_names_are_unique_over_all_sections() -> None:
    specs = all_flag_specs()
    dests = [spec.dest for spec in specs]
    names = [name for spec in specs if spec.form != "none" for name in spec.names]
    assert len(dests) == len(set(dests))
    assert len(names) == len(set(names))


def test_every_field_is_documented_and_every_default_is_accepted() -> None:
    assert [s.dest for s in all_flag_specs() if len(s.info.help) < 10] == []
    for section in SECTIONS.values():
        section()


def test_sections_are_the_fields_of_config() -> None:
    assert set(SECTIONS) <= {f.name for f in fields(Config)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example(Section):
    """Example."""

    count: int = flag(1, at_least=1, doc="A count of things.")
    share: float | None = flag(None, above=0, at_most=1, doc="A share of things.")
    kind: Literal["a", "b"] = flag("a", doc="A kind of thing.")
    on: bool = flag(False, doc="Turns something on.")
    kept: bool = flag(True, off="--disable-kept", doc="Turns something off.")
    either: bool | None = flag(None, doc="On, off or derived.")
    names: tuple[str, ...] | None = flag(None, doc="Names of things.")
    more: tuple[int, ...] = flag((), append=True, doc="Accumulates numbers.")
    table: dict[str, int] = flag({"x": 1}, doc="A JSON object.")  # noqa: RUF009
    result: int = derived(0, doc="Worked out by rules.")


def test_forms_follow_from_annotations() -> None:
    specs = {spec.dest: spec for spec in flag_specs(_Example, "example")}
    assert {name: spec.form for name, spec in specs.items()} == {
        "count": "value",
        "share": "value",
        "kind": "value",
        "on": "on",
        "kept": "off",
        "either": "pair",
        "names": "list",
        "more": "append",
        "table": "json",
        "result": "none",
    }
    assert specs["kind"].choices == ("a", "b")
    assert specs["kept"].names == ("--disable-kept",)
    assert specs["either"].names == ("--either", "--no-either")
    assert (specs["share"].type, specs["more"].type) == (float, int)


def test_dict_defaults_are_not_shared() -> None:
    first, second = _Example(), _Example()
    assert first.table == second.table
    assert first.table is not second.table


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "--count must be at least 1, found 0"),
        ({"share": 0.0}, "--share must be > 0, found 0"),
        ({"share": 1.5}, "--share must be at most 1, found 1.5"),
        ({"share": math.nan}, "--share must be a finite number > 0 and <= 1, found nan"),
        ({"share": math.inf}, "--share must be a finite number > 0 and <= 1, found inf"),
        ({"kind": "c"}, "--kind c: accepted values are a, b"),
    ],
)
def test_a_section_checks_itself(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _Example(**values)  # type: ignore[arg-type]
    assert caught.value.problems == (message,)


def test_established_forms_and_defaults() -> None:
    """Spot checks of the established interface that scripts rely on."""
    specs = {spec.name: spec for spec in all_flag_specs() if spec.form != "none"}
    expected = {
        "--disable-grpo-std-normalization": ("grpo_std_normalization", True, "off"),
        "--disable-rewards-normalization": ("rewards_normalization", True, "off"),
        "--disable-compute-advantages-and-returns": ("compute_advantages_and_returns", True, "off"),
        "--disable-rollout-global-dataset": ("rollout_global_dataset", True, "off"),
        "--disable-wandb-random-suffix": ("wandb_random_suffix", True, "off"),
        "--offload-train": ("offload_train", None, "pair"),
        "--actor-num-gpus-per-node": ("actor_num_gpus_per_node", 8, "value"),
        "--rollout-seed": ("rollout_seed", 42, "value"),
        "--update-weight-buffer-size": ("update_weight_buffer_size", 536870912, "value"),
        "--eps-clip": ("eps_clip", 0.2, "value"),
        "--tis-clip": ("tis_clip", 2.0, "value"),
        "--rollout-health-check-interval": ("rollout_health_check_interval", 30.0, "value"),
        "--sglang-server-concurrency": ("sglang_server_concurrency", 512, "value"),
        "--sglang-router-request-timeout-secs": ("sglang_router_request_timeout_secs", 14400, "value"),
        "--data-pad-size-multiplier": ("data_pad_size_multiplier", 128, "value"),
        "--kl-loss-type": ("kl_loss_type", "k1", "value"),
        "--input-key": ("input_key", "input", "value"),
        "--metadata-key": ("metadata_key", "metadata", "value"),
        "--tool-key": ("tool_key", "tools", "value"),
    }
    assert {name: (specs[name].dest, specs[name].default, specs[name].form) for name in expected} == expected
