"""Evaluation during training."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.eval_datasets import EvalDatasetConfig
from slime.config.flags import Section, derived, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(Section):
    """Evaluation."""

    eval_function_path: str | None = flag(
        None, doc="Evaluation function, called with evaluation=True. Default: the rollout function."
    )
    eval_interval: int | None = flag(None, at_least=1, doc="Evaluate after every N rollouts; needs evaluation data.")
    eval_prompt_data: tuple[str, ...] | None = flag(
        None,
        append=True,
        metavar="NAME PATH",
        doc="Evaluation sets as pairs of name and file; repeatable, accumulating. One lone value is a file named aime.",
    )
    eval_config: str | None = flag(
        None, metavar="YAML", doc="Evaluation sets with settings of their own; replaces --eval-prompt-data."
    )
    skip_eval_before_train: bool = flag(False, doc="No evaluation before the first step.")
    eval_input_key: str | None = flag(None, doc="Prompt column. Default: --input-key.")
    eval_label_key: str | None = flag(None, doc="Label column. Default: --label-key.")
    eval_tool_key: str | None = flag(None, doc="Tools column. Default: --tool-key.")
    n_samples_per_eval_prompt: int = flag(1, at_least=1, doc="Samples per evaluation prompt.")
    eval_temperature: float | None = flag(
        None, at_least=0, doc="Sampling temperature; 0 is greedy. Default: --rollout-temperature."
    )
    eval_top_p: float | None = flag(None, above=0, at_most=1, doc="Default: --rollout-top-p.")
    eval_top_k: int | None = flag(None, at_least=-1, doc="Default: --rollout-top-k.")
    eval_max_response_len: int | None = flag(None, at_least=1, doc="Default: --rollout-max-response-len.")
    eval_max_prompt_len: int | None = flag(
        None, at_least=1, doc="Longer evaluation prompts are dropped. Default: --rollout-max-prompt-len."
    )
    eval_min_new_tokens: int | None = flag(None, at_least=0, doc="Fewest response tokens.")
    eval_max_context_len: int | None = flag(None, at_least=2, doc="Default: --rollout-max-context-len.")
    eval_custom_rm_path: str | None = flag(None, doc="Reward function of evaluation. Default: --custom-rm-path.")
    eval_datasets: tuple[EvalDatasetConfig, ...] = derived((), doc="The evaluation sets with all settings resolved.")
