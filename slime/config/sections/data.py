"""Prompts in, batches out: files, columns, batch arithmetic, packing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Section):
    """Data and batches."""

    prompt_data: str | None = flag(
        None, metavar="FILE", doc="Prompts: .jsonl or .parquet, optionally with a slice, path@[start:end]."
    )
    num_rollout: int | None = flag(None, at_least=0, doc="Rollout steps in total (exclusive end id).")
    num_epoch: int | None = flag(
        None, at_least=1, doc="Passes over the prompts; used when --num-rollout is unset. Default then: 1."
    )
    rollout_global_dataset: bool = flag(
        True, off="--disable-rollout-global-dataset", doc="The data source of your own manages its data itself."
    )
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", doc="Data source class, built as cls(args)."
    )
    apply_chat_template: bool = flag(False, doc="Render prompts (message lists or text) with the chat template.")
    apply_chat_template_kwargs: Mapping[str, Any] = flag(
        {}, metavar="JSON", doc="Arguments of the chat template, for example '{\"enable_thinking\": false}'."
    )
    input_key: str = flag("input", doc="Prompt column: text or a message list.")
    label_key: str | None = flag(None, doc="Label column.")
    multimodal_keys: Mapping[str, Any] | None = flag(
        None, metavar="JSON", doc='Media columns, for example \'{"image": "images"}\'.'
    )
    metadata_key: str = flag("metadata", doc="Metadata column (an object).")
    tool_key: str = flag("tools", doc="Tools column.")
    rollout_batch_size: int = flag(32, at_least=1, doc="Prompts (groups) per rollout.")
    n_samples_per_prompt: int = flag(
        1, at_least=1, doc="Samples per group; 1 turns off the standard deviation of the group baseline."
    )
    global_batch_size: int | None = flag(
        None, at_least=1, doc="Samples per optimizer step. Default: all samples of a rollout in one step."
    )
    num_steps_per_rollout: int | None = flag(
        None, at_least=1, doc="Optimizer steps per rollout; with it --global-batch-size is worked out."
    )
    micro_batch_size: int = flag(1, at_least=1, doc="Samples per forward pass; ignored with --use-dynamic-batch-size.")
    balance_data: bool = flag(False, doc="Balance token counts over data-parallel ranks.")
    balance_by_flops: bool = flag(
        False, doc="Balance estimated FLOPs; needs --use-dynamic-batch-size and implies --balance-data."
    )
    use_dynamic_batch_size: bool = flag(False, doc="Pack micro-batches by tokens; needs --max-tokens-per-gpu.")
    max_tokens_per_gpu: int | None = flag(
        None,
        at_least=1,
        doc="Tokens of a packed micro-batch per GPU; a context-parallel group holds this times its size.",
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None, at_least=1, doc="The same in forward-only passes. Default: --max-tokens-per-gpu."
    )
    data_pad_size_multiplier: int = flag(
        128, at_least=1, doc="Packed length is padded to a multiple of this times the tensor-parallel size (CUDA)."
    )
    num_data_workers: int | None = flag(
        None,
        at_least=0,
        doc="Processes that read and tokenize prompts; 0 or unset: in process. The order never changes.",
    )
    streaming_data: bool = flag(False, doc="Read the prompt file lazily instead of holding it in memory.")
    skip_bad_rows: bool = flag(False, doc="Skip and count rows that cannot be read instead of stopping.")
    max_bad_row_fraction: float = flag(
        0.01, at_least=0, at_most=1, doc="With --skip-bad-rows: share of bad rows above which the run stops."
    )
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = flag(
        "qwen", doc="How multi-turn loss masks are made from a chat template."
    )
