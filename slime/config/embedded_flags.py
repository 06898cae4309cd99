"""What each of the engine's flags means to the embedded engine: used, without effect, or refused.

The flags are SGLang's. The embedded engine understands a few; flags about speed, memory and placement of
kernels change no answer and are only reported; everything else would change results, interfaces or
security if it were ignored, so it is refused. Tests hold the table against the server's own parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.draft import Draft
from slime.config.engine_flags import SGLANG_DEFAULTS, SGLANG_FLAGS, SGLANG_SECRETS
from slime.config.flags import words

EMBEDDED_VALUES: Mapping[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "log_level": ("debug", "info", "warning", "error"),
}
"""Values of a used flag where the embedded engine accepts fewer than SGLang; capitals do not matter."""

EMBEDDED_COUNTS = frozenset({"chunked_prefill_size", "context_length", "max_running_requests", "max_total_tokens"})
"""Used flags whose value must be at least 1."""

EMBEDDED_USED = frozenset(
    {
        *EMBEDDED_VALUES,
        *EMBEDDED_COUNTS,
        "disable_radix_cache",
        "enable_deterministic_inference",  # read by the rollout, which sends a seed with each request
        "host",
        "mem_fraction_static",
        "served_model_name",
        "skip_tokenizer_init",
        "tokenizer_path",
        "weight_version",
    }
)
"""Flags that reach the embedded engine."""

_SPEED_AND_MEMORY = """
    attention_backend batch_notify_size bf16_gemm_backend crash_dump_folder cuda_graph_backend_decode
    cuda_graph_backend_prefill cuda_graph_bs cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config
    cuda_graph_max_bs cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
    cuda_graph_prefill_max_context cuda_graph_tc_compiler debug_cuda_graph decode_attention_backend
    decode_log_interval deepep_mode detokenizer_worker_num disable_chunked_prefix_cache disable_cuda_graph
    disable_cuda_graph_padding disable_custom_all_reduce disable_decode_cuda_graph disable_flashinfer_autotune
    disable_outlines_disk_cache disable_overlap_schedule disable_piecewise_cuda_graph disable_prefill_cuda_graph
    disable_shared_experts_fusion disable_tokenizer_batch_decode dist_timeout dsa_decode_backend
    dsa_prefill_backend dsa_topk_backend enable_breakable_cuda_graph enable_cudagraph_gc
    enable_draft_weights_cpu_backup enable_dynamic_batch_tokenizer enable_dynamic_chunking
    enable_flashinfer_allreduce_fusion enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
    enable_mixed_chunk enable_mscclpp enable_nccl_nvls enable_p2p_check enable_profile_cuda_graph
    enable_request_time_stats_logging enable_single_batch_overlap enable_symm_mem enable_tokenizer_batch_encode
    enable_torch_compile enable_torch_symm_mem enable_two_batch_overlap enable_weights_cpu_backup
    enforce_piecewise_cuda_graph fp8_gemm_runner_backend gc_threshold gc_warning_threshold_secs grammar_backend
    log_level_http mamba_scheduler_strategy max_prefill_tokens mm_attention_backend moe_a2a_backend
    moe_runner_backend nsa_decode_backend nsa_prefill_backend num_continuous_decode_steps
    num_reserved_decode_tokens numa_node page_size piecewise_cuda_graph_compiler piecewise_cuda_graph_max_tokens
    piecewise_cuda_graph_tokens pre_warm_nccl prefill_attention_backend prefill_max_requests
    radix_eviction_policy sampling_backend schedule_conservativeness scheduler_recv_interval show_time_cost
    sleep_on_idle soft_watchdog_timeout stream_interval tokenizer_worker_num torch_compile_max_bs
    triton_attention_num_kv_splits triton_attention_split_tile_size watchdog_timeout weight_loader_disable_mmap
    weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
"""

EMBEDDED_WITHOUT_EFFECT = frozenset(_SPEED_AND_MEMORY.split())
"""Flags about speed, memory, placement and the engine's own logs; no answer depends on them."""


def embedded_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of the engine's values the embedded engine is told."""
    return {name: value for name, value in values.items() if name in EMBEDDED_USED}


def check_embedded_flags(draft: Draft, values: Mapping[str, Any]) -> None:
    """Refuse what the embedded engine cannot do, and say once what has no effect on it.

    Args:
        draft: Gets the problems and the notice.
        values: The engine's values that the user gave, by attribute name.
    """
    if draft.engine.rollout_backend != "embedded" or draft.debug.debug_train_only:
        return
    ignored: list[str] = []
    for name, value in values.items():
        flag = "--sglang-" + name.replace("_", "-")
        if name in EMBEDDED_USED:
            draft.problems += _value_problems(flag, name, value)
        elif name in EMBEDDED_WITHOUT_EFFECT:
            ignored.append(flag)
        elif name not in SGLANG_FLAGS or value != SGLANG_DEFAULTS[name]:
            shown = "" if value is True or name in SGLANG_SECRETS else f" {words(value)}"
            draft.problems.append(
                f"{flag}{shown}: the embedded engine does not have this, and ignoring it would change results, "
                "interfaces or security; leave it out or use --rollout-backend sglang"
            )
    if ignored:
        verb = "has" if len(ignored) == 1 else "have"
        draft.notices.append(f"{', '.join(ignored)} {verb} no effect on the embedded engine")


def _value_problems(flag: str, name: str, value: Any) -> list[str]:
    accepted = EMBEDDED_VALUES.get(name)
    if accepted is not None and str(value).lower() not in accepted:
        return [f"{flag} {value}: the embedded engine accepts {', '.join(accepted)}"]
    if name in EMBEDDED_COUNTS and value < 1:
        return [f"{flag} {value}: the embedded engine needs an integer of at least 1"]
    if name == "mem_fraction_static" and not 0 < value < 1:
        return [f"{flag} {value:g}: must be between 0 and 1"]
    return []
