"""How responses are generated: sampling, lengths, filters, hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Section):
    """Rollout."""

    hf_checkpoint: str | None = flag(
        None,
        metavar="DIR",
        doc="Hugging Face model directory: tokenizer, config, the engines' first weights, template for weight export.",
    )
    model_name: str | None = flag(
        None, doc="Family key for weight conversion; by default taken from the model's config.json."
    )
    rollout_function_path: str = flag(
        "slime.rollout.sglang_rollout.generate_rollout",
        doc="Rollout function (args, rollout_id, data_source, evaluation=False).",
    )
    rollout_temperature: float = flag(
        1.0, above=0, doc="Sampling temperature; also divides the training logits for log-probs."
    )
    rollout_top_p: float = flag(
        1.0, above=0, at_most=1, doc="Nucleus sampling. Training scores under the truncated distribution."
    )
    rollout_top_k: int = flag(-1, at_least=-1, doc="Sample among the k most likely tokens, and score so; -1: all.")
    rollout_max_context_len: int | None = flag(
        None, at_least=2, doc="Cap on prompt plus response, in tokens; clips later turns too."
    )
    rollout_max_prompt_len: int | None = flag(
        None,
        at_least=1,
        doc="Longer prompts are dropped when the data is read. Default with a context length: that minus 1.",
    )
    rollout_max_response_len: int | None = flag(
        None, at_least=1, doc="Response tokens per sample. Default: the context length when given, else 1024."
    )
    rollout_skip_special_tokens: bool = flag(False, doc="Leave special tokens out of the response text.")
    rollout_stop: tuple[str, ...] | None = flag(None, metavar="TEXT", doc="Stop strings.")
    rollout_stop_token_ids: tuple[int, ...] | None = flag(None, metavar="ID", doc="Stop token ids.")
    rollout_shuffle: bool = flag(False, doc="Shuffle prompts each epoch with seed --rollout-seed plus the epoch.")
    rollout_seed: int = flag(42, doc="Seed of the prompt order and of sampling in the engines.")
    over_sampling_batch_size: int | None = flag(
        None, at_least=1, doc="Groups taken per refill; at least and by default --rollout-batch-size."
    )
    dynamic_sampling_filter_path: str | None = flag(
        None, doc="Filter (args, samples) -> DynamicFilterOutput | bool for finished groups."
    )
    partial_rollout: bool = flag(False, doc="Put unfinished samples back and continue them in the next rollout.")
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, doc="Do not train tokens that older weights made in a continued sample."
    )
    max_failed_sample_share: float = flag(
        0.1,
        at_least=0,
        at_most=1,
        doc="Share of a rollout's samples that user functions or requests may fail before the run stops; one always "
        "may. A failed sample is kept without loss.",
    )
    custom_generate_function_path: str | None = flag(
        None,
        metavar="PATH",
        doc="Generation of one sample: pkg.module.function, pkg.module:function, file.py:function or file.py.",
    )
    max_turns: int = flag(
        10, at_least=1, doc="For plug-ins only, as args.max_turns: assistant turns of a multi-turn generate function."
    )
    rollout_sample_hook_path: tuple[str, ...] = flag(
        (), append=True, metavar="PATH", doc="Hook (args, sample, ...) run on each finished sample; repeatable."
    )
    rollout_sample_filter_path: str | None = flag(
        None, doc="Function (args, groups) that sets remove_sample on samples that must not train."
    )
    rollout_all_samples_process_path: str | None = flag(
        None, doc="Function (args, all_groups, data_source) that also sees dropped groups."
    )
    custom_rollout_log_function_path: str | None = flag(
        None, doc="Function (rollout_id, args, samples, rollout_extra_metrics, rollout_time); True skips our logging."
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, doc="Function (rollout_id, args, data, extra_metrics); True skips our logging."
    )
    buffer_filter_path: str = flag(
        "slime.rollout.data_source.pop_first",
        doc="Selection from the buffer: (args, rollout_id, buffer, num_samples).",
    )
    keep_old_actor: bool = flag(False, doc="Keep the rollout-time weights for old log-probs.")
    rollout_data_postprocess_path: str | None = flag(
        None, doc="Hook (args, rollout_id, rollout_data) in the trainer after the log-prob passes."
    )
    rollout_data_transport: Literal["object-store", "nixl"] = flag(
        "object-store", doc="How rollout data moves to the training processes."
    )
    async_buffer_size: int = flag(
        1,
        at_least=1,
        doc="train_async.py: finished rollouts that may wait for training. Staleness is at most N plus the update "
        "interval minus 1.",
    )
    max_weight_staleness: int | None = flag(
        None,
        at_least=0,
        doc="Fully asynchronous rollout: oldest weights, in versions, a trained sample may come from.",
    )
    rollout_external_engine_addrs: tuple[str, ...] | None = flag(
        None, metavar="HOST:PORT", doc="Use engines that already run, on GPUs of their own."
    )
    rollout_buffer_url: str | None = flag(None, doc="Address of an external rollout buffer.")
    fetch_trajectory_retry_times: int = flag(-1, at_least=-1, doc="Tries to fetch from the buffer; -1: no limit.")
    min_batch_collection_ratio: float = flag(
        1.0, above=0, at_most=1, doc="Share of a batch the external buffer must deliver."
    )
    rollout_task_type: str = flag("math", doc="Task name told to the external buffer.")
