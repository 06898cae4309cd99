"""Established import paths: one table of where each name lives now.

User scripts and plug-ins import ``slime.utils.types.Sample`` and the like. ``import slime`` installs
a finder that makes the modules of the table importable; a name is looked up in its real module
when it is first used, so installing costs nothing and imports nothing. The objects are the very
same ones. Real modules win: the finder is asked only for what is not on disk. A name that slime
does not offer is not in the table, and asking for it says what there is.

Tests hold: every row of the table resolves, the objects are identical, and ``import slime`` loads
neither torch nor ray nor transformers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ESTABLISHED: Mapping[str, Mapping[str, str]] = {
    "slime.utils.types": {
        "Sample": "slime.types:Sample",
        "ParamInfo": "slime.types:ParamInfo",
        "RolloutBatch": "slime.types:RolloutBatch",
        "MultimodalType": "slime.data.templates:MultimodalType",
        "MultimodalTypes": "slime.data.templates:MultimodalTypes",
    },
    "slime.utils.misc": {
        "load_function": "slime.rollout.established:load_function",
        "should_run_periodic_action": "slime.cluster.schedule:should_run_periodic_action",
    },
    "slime.utils.async_utils": {
        "run": "slime.rollout.established:run",
        "get_async_loop": "slime.rollout.established:get_async_loop",
    },
    "slime.utils.http_utils": {
        "post": "slime.rollout.established:post",
        "get": "slime.rollout.established:get",
        "init_http_client": "slime.rollout.established:init_http_client",
        "get_rollout_num_engines": "slime.rollout.established:get_rollout_num_engines",
    },
    "slime.utils.data": {
        "Dataset": "slime.data.dataset:Dataset",
        "read_file": "slime.data.files:read_file",
        "filter_long_prompt": "slime.data.dataset:filter_long_prompt",
        "get_source": "slime.data.dataset:get_source",
    },
    "slime.utils.mask_utils": {
        "MultiTurnLossMaskGenerator": "slime.data.masks:MultiTurnLossMaskGenerator",
    },
    "slime.utils.processing_utils": {
        "load_tokenizer": "slime.data.templates:load_tokenizer",
        "load_processor": "slime.data.templates:load_processor",
    },
    "slime.utils.dp_schedule": {
        "build_dp_schedule": "slime.data.packing:build_dp_schedule",
    },
    "slime.utils.arguments": {
        "parse_args": "slime.cli:parse_established_args",
    },
    "slime.utils.eval_config": {
        "EvalDatasetConfig": "slime.config.eval_datasets:EvalDatasetConfig",
        "build_eval_dataset_configs": "slime.config.eval_datasets:build_eval_dataset_configs",
        "ensure_dataset_list": "slime.config.eval_datasets:ensure_dataset_list",
    },
    "slime.observability.logging_utils": {
        "configure_logger": "slime.observability.logger:configure_logger",
        "init_tracking": "slime.observability.tracking:init_tracking",
        "log": "slime.observability.tracking:log",
    },
    "slime.observability.trace_utils": {
        name: f"slime.observability.trace:{name}"
        for name in (
            *("bind_trace", "trace_span", "trace_event", "trace_function", "trace_next_attempt"),
            *("export_trace", "import_trace", "TraceHandle"),
        )
    },
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": "slime.rollout.types:RolloutFnTrainOutput",
        "RolloutFnEvalOutput": "slime.rollout.types:RolloutFnEvalOutput",
        "call_rollout_fn": "slime.rollout.types:call_rollout_fn",
    },
    "slime.rollout.data_source": {
        "DataSource": "slime.data.source:DataSource",
        "RolloutDataSource": "slime.data.source:RolloutDataSource",
        "RolloutDataSourceWithBuffer": "slime.data.source:RolloutDataSourceWithBuffer",
        "pop_first": "slime.data.source:pop_first",
    },
    "slime.rollout.sglang_rollout": {
        "GenerateState": "slime.rollout.state:GenerateState",
        "generate": "slime.rollout.generate:generate",
        "generate_and_rm": "slime.rollout.generate:generate_and_rm",
        "generate_and_rm_group": "slime.rollout.generate:generate_and_rm_group",
        "abort": "slime.rollout.pipeline:abort",
        "generate_rollout": "slime.rollout.pipeline:generate_rollout",
        "generate_rollout_async": "slime.rollout.pipeline:generate_rollout_async",
        "eval_rollout": "slime.rollout.evaluate:eval_rollout",
        "eval_rollout_single_dataset": "slime.rollout.evaluate:eval_rollout_single_dataset",
        "get_model_url": "slime.rollout.established:get_model_url",
    },
    "slime.rollout.sft_rollout": {
        "generate_rollout": "slime.rollout.sft:generate_rollout",
    },
    "slime.rollout.on_policy_distillation": {
        "reward_func": "slime.rollout.distillation:reward_func",
        "post_process_rewards": "slime.rollout.distillation:post_process_rewards",
    },
    "slime.rollout.rm_hub": {
        "async_rm": "slime.rewards:async_rm",
        "batched_async_rm": "slime.rewards:batched_async_rm",
        "remote_rm": "slime.rewards:remote_rm",
    },
    "slime.rollout.rm_hub.deepscaler": {
        "get_deepscaler_rule_based_reward": "slime.rewards.scorers:get_deepscaler_rule_based_reward",
    },
    "slime.rollout.rm_hub.math_utils": {
        "extract_answer": "slime.rewards.scorers:extract_answer",
        "extract_boxed_answer": "slime.rewards.scorers:extract_boxed_answer",
        "grade_answer_mathd": "slime.rewards.scorers:grade_answer_mathd",
        "grade_answer_sympy": "slime.rewards.scorers:grade_answer_sympy",
        "grade_answer_verl": "slime.rewards.scorers:grade_answer_verl",
    },
    "slime.rollout.rm_hub.math_dapo_utils": {
        "compute_score": "slime.rewards.scorers:compute_score",
    },
    "slime.rollout.rm_hub.f1": {
        "f1_score": "slime.rewards.rules:f1_score",
    },
    "slime.rollout.rm_hub.gpqa": {
        "compute_gpqa_reward": "slime.rewards.scorers:compute_gpqa_reward",
    },
    "slime.rollout.filter_hub.base_types": {
        "DynamicFilterOutput": "slime.rollout.filters:DynamicFilterOutput",
        "MetricGatherer": "slime.rollout.filters:MetricGatherer",
        "call_dynamic_filter": "slime.rollout.filters:call_dynamic_filter",
        "should_drop_dynamic_filter_output": "slime.rollout.filters:should_drop_dynamic_filter_output",
    },
    "slime.backends.megatron_utils.loss": {
        "get_log_probs_and_entropy": "slime.backends.megatron.established_loss:get_log_probs_and_entropy",
        "icepop_function": "slime.backends.megatron.established_loss:icepop_function",
        "vanilla_tis_function": "slime.backends.megatron.established_loss:vanilla_tis_function",
    },
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": "slime.rollout.filters:check_reward_nonzero_std",
        "check_reward_nonzero_std_with_fallback": "slime.rollout.filters:check_reward_nonzero_std_with_fallback",
    },
}
"""Established module -> its names -> ``module:attribute`` where each lives now."""


def established_packages() -> frozenset[str]:
    """Parents of the modules in the table that exist only through it, such as ``slime.utils``."""
    parents = {module.rpartition(".")[0] for module in ESTABLISHED}
    parents |= {parent.rpartition(".")[0] for parent in parents}
    return frozenset(parent for parent in parents if parent.startswith("slime."))


class EstablishedModule(ModuleType):
    """A module whose names live elsewhere and are fetched when they are first used."""

    def __getattr__(self, name: str) -> Any:
        target = ESTABLISHED.get(self.__name__, {}).get(name)
        if target is None:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}; it offers {_offered(self.__name__)}"
            )
        location, _, attribute = target.partition(":")
        value = getattr(importlib.import_module(location), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *ESTABLISHED.get(self.__name__, {})]


def _offered(module: str) -> str:
    names = sorted(ESTABLISHED.get(module, {}))
    names += sorted(m.rpartition(".")[2] for m in ESTABLISHED if m.rpartition(".")[0] == module)
    return ", ".join(names)


class EstablishedFinder(MetaPathFinder, Loader):
    """Finds and creates the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the table's modules and their packages."""
        if not fullname.startswith("slime."):
            return None
        is_package = fullname in established_packages()
        if not is_package and fullname not in ESTABLISHED:
            return None
        return ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that fetches its names lazily."""
        return EstablishedModule(spec.name, f"Established import path; see {__name__}.")

    def exec_module(self, module: ModuleType) -> None:
        """Say what ``from module import *`` imports, and what there is."""
        module.__dict__["__all__"] = sorted(ESTABLISHED.get(module.__name__, {}))
        # Python shows this text in the ImportError of `from module import missing`, and nothing else of ours.
        module.__dict__["__file__"] = f"<established path, offers {_offered(module.__name__)}>"


def install() -> None:
    """Make the table importable; after the ordinary finders, so that real modules win."""
    if not any(isinstance(finder, EstablishedFinder) for finder in sys.meta_path):
        sys.meta_path.append(EstablishedFinder())
