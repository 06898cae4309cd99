"""Tables of the configuration that repeat what another layer knows: each is compared with its source."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from slime.algorithms import ALGORITHMS
from slime.config.eval_datasets import EvalDatasetConfig
from slime.config.hf import LOADABLE_MODEL_TYPES
from slime.config.megatron_flags import MEGATRON_FLAGS
from slime.config.rules.availability import AVAILABLE_VALUES, UNAVAILABLE_EVAL_KEYS
from slime.config.rules.inputs import REWARD_TYPES
from slime.config.rules.placement import ADDRESS_BOUND_FLAGS
from slime.config.schema import all_flag_specs
from slime.config.sections.algorithm import CRITIC_ESTIMATORS, KL_PENALTY_ESTIMATORS, WHITENED_ESTIMATORS
from slime.rewards.registry import REWARDS
from slime.weights.families import FAMILIES

ROOT = Path(__file__).parents[3]

FOR_PLUGINS_ONLY = {"max_turns": "bounds the loop of a user's generate function, which reads args.max_turns"}

RESOLVED_BY_CONFIG = {
    "actor_num_nodes": "read through cluster.world_size",
    "actor_num_gpus_per_node": "read through cluster.world_size",
    "megatron_config_path": "its entries become values, Megatron tokens and Config.critic",
    "dump_details": "sets save_debug_rollout_data and save_debug_train_data",
    "custom_config_path": "its entries become values, Megatron tokens and Config.custom",
    "eval_prompt_data": "becomes eval.eval_datasets",
    "eval_input_key": "becomes eval.eval_datasets",
    "eval_label_key": "becomes eval.eval_datasets",
    "eval_tool_key": "becomes eval.eval_datasets",
    "eval_temperature": "becomes eval.eval_datasets",
    "eval_top_p": "becomes eval.eval_datasets",
    "eval_top_k": "becomes eval.eval_datasets",
    "eval_max_response_len": "becomes eval.eval_datasets",
    "eval_min_new_tokens": "becomes eval.eval_datasets",
    "eval_custom_rm_path": "becomes eval.eval_datasets",
    "num_gpus_per_node": "cuts engines into processes in engine_plan",
    "rollout_num_gpus_per_engine": "cuts rollout slots into engines in engine_plan",
    "rollout_external_engine_addrs": "becomes Config.external_engines",
    "sglang_config": "becomes Config.deployment",
    "prefill_num_servers": "becomes Config.deployment",
    "offload": "becomes offload_train and offload_rollout",
    "train_backend": "has one value",
    "rs_lower_bound": "becomes rs_bounds",
    "rs_upper_bound": "becomes rs_bounds",
    "tis_lower_bound": "becomes tis_bounds",
    "tis_upper_bound": "becomes tis_bounds",
}


def sources() -> str:
    paths = [path for path in (ROOT / "slime").rglob("*.py") if "config" not in path.relative_to(ROOT / "slime").parts]
    return "\n".join(path.read_text(encoding="utf-8") for path in (*paths, ROOT / "train.py", ROOT / "train_async.py"))


def test_every_flag_is_read_or_said_to_be_unavailable() -> None:
    read = set(re.findall(r"\.(\w+)\b", sources()))
    dests = {spec.dest for spec in all_flag_specs()}
    explained = {*FOR_PLUGINS_ONLY, *RESOLVED_BY_CONFIG}
    assert {*explained, *AVAILABLE_VALUES} <= dests
    assert dests - read - set(AVAILABLE_VALUES) - explained == set()
    assert explained & read == set(), "these are read by now: take them out of the lists"


def test_every_setting_of_an_evaluation_set_is_read_or_unavailable() -> None:
    text = sources() + (ROOT / "slime" / "config" / "eval_datasets.py").read_text(encoding="utf-8")
    read = set(re.findall(r"\b(?:self|dataset|d|config)\.(\w+)\b", text))
    names = {f.name for f in fields(EvalDatasetConfig)}
    assert names >= UNAVAILABLE_EVAL_KEYS
    assert names - read - UNAVAILABLE_EVAL_KEYS == set()


def test_estimators() -> None:
    known = {choice for s in all_flag_specs() if s.dest == "advantage_estimator" for choice in s.choices or ()}
    assert known == set(ALGORITHMS)
    assert known > WHITENED_ESTIMATORS
    assert known > KL_PENALTY_ESTIMATORS
    assert {name for name, spec in ALGORITHMS.items() if spec.needs_critic} == CRITIC_ESTIMATORS


def test_graders() -> None:
    assert set(REWARD_TYPES) == set(REWARDS)


def test_model_families() -> None:
    assert set(FAMILIES) == LOADABLE_MODEL_TYPES


def test_flags_that_bind_memory_to_its_place_are_megatrons() -> None:
    assert ADDRESS_BOUND_FLAGS <= MEGATRON_FLAGS
