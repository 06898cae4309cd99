"""The engine's public flags as recorded data, for machines where it is not installed.

With SGLang installed its own parser decides (``engine_families``); this table keeps every command line
checkable without it, and tells ``args`` which attributes exist and what they are when unset.
Recorded from SGLang 0.5.15 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["flag", "pair", "int", "float", "str", "int*", "float*", "str*", "json"]
"""How a value is written: present or not; ``--x`` / ``--no-x``; one value; several values; JSON."""


def flag_table(rows: Mapping[Kind, str]) -> dict[str, Kind]:
    """Names by kind as name -> kind."""
    return {name: kind for kind, names in rows.items() for name in names.split()}


SGLANG_FLAGS: Mapping[str, Kind] = flag_table(
    {
        "str": """
            admin_api_key api_key attention_backend bf16_gemm_backend boundary_reduction chat_template
            completion_template constrained_json_whitespace_pattern cp_strategy crash_dump_folder
            cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_config cuda_graph_tc_compiler
            dcp_comm_backend debug_tensor_dump_input_file debug_tensor_dump_output_folder decode_attention_backend
            decoupled_spec_bind_endpoint decoupled_spec_role decrypted_config_file decrypted_draft_config_file
            deepep_config deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode device
            disaggregation_decode_allocation_policy disaggregation_decode_retraction_backup disaggregation_ib_device
            disaggregation_mode disaggregation_transfer_backend dllm_algorithm dllm_algorithm_config download_dir
            dsa_decode_backend dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_prefill_cp_mode dsa_topk_backend
            dsv4_attn_backend dsv4_prefill_backend dtype elastic_ep_backend encoder_transfer_backend
            ep_dispatch_algorithm ep_join_mode eplb_algorithm expert_balancedness_report_mode
            expert_distribution_recorder_mode export_metrics_to_file_dir fastapi_root_path file_storage_path
            flashinfer_a2a_dispatch_type flashinfer_allreduce_fusion_backend flashinfer_mxfp4_moe_precision
            flexkv_config_file forward_pass_metrics_ipc_name forward_pass_metrics_worker_id fp4_gemm_runner_backend
            fp8_gemm_runner_backend grammar_backend hf_chat_template_name hicache_host_memory_mode
            hicache_io_backend hicache_mem_layout hicache_storage_backend hicache_storage_backend_extra_config
            hicache_storage_prefetch_policy hicache_write_policy hisparse_config host image_processor_backend
            init_expert_location json_model_override_args kt_method kt_weight_path kv_cache_dtype kv_canary
            kv_canary_real_data kv_events_config linear_attn_backend linear_attn_decode_backend
            linear_attn_prefill_backend linear_attn_verify_backend lmcache_config_file load_balance_method
            load_format load_publish_endpoint log_level log_level_http log_requests_format lora_backend
            lora_eviction_policy mamba_backend mamba_radix_cache_strategy mamba_scheduler_strategy mamba_ssm_dtype
            mm_attention_backend mm_feature_transport mm_global_cache_backend model_checksum model_config_parser
            model_impl model_loader_extra_config modelexpress_config modelopt_checkpoint_restore_path
            modelopt_checkpoint_save_path modelopt_export_path modelopt_quant moe_a2a_backend moe_runner_backend
            mooncake_ib_device msprobe_dump_config nsa_decode_backend nsa_prefill_backend nsa_prefill_cp_mode
            offload_mode otlp_service_name otlp_traces_endpoint pdmux_config_path piecewise_cuda_graph_compiler
            ple_offload_backend ple_offload_dir prefill_attention_backend prefill_cp_mode
            prefill_kv_cache_dequant_dtype qsa_indexer_dtype quantization quantization_param_path
            radix_cache_backend radix_eviction_policy reasoning_parser remote_instance_weight_loader_backend
            remote_instance_weight_loader_seed_instance_ip retraction_policy return_hidden_states_mode revision
            rl_on_policy_target rl_quant_profile sampling_backend sampling_defaults schedule_policy
            served_model_name sidecar spec_trace_dir speculative_adaptive_config speculative_algorithm
            speculative_attention_mode speculative_draft_attention_backend speculative_draft_kv_cache_dtype
            speculative_draft_load_format speculative_draft_model_path speculative_draft_model_quantization
            speculative_draft_model_revision speculative_dsa_topk_backend speculative_dspark_confidence_sts_path
            speculative_dspark_sps_table_path speculative_moe_a2a_backend speculative_moe_runner_backend
            speculative_ngram_external_corpus_path speculative_ngram_match_type speculative_token_map ssl_ca_certs
            ssl_certfile ssl_keyfile ssl_keyfile_password startup_weight_load_mode tokenizer_backend
            tokenizer_metrics_custom_labels_header tokenizer_mode tokenizer_path tool_call_parser tool_server
            torchao_config trace_modules unified_cache_external_linker_backend uno_lora_path warmups
            watermark_config weight_cache_mode weight_cache_socket weight_version
        """,
        "int": """
            asr_max_buffer_seconds asr_max_concurrent_sessions attn_cp_size attn_dp_size batch_notify_size
            c128_page_size chunked_prefill_size constrained_json_max_whitespace_cnt context_length cpu_offload_gb
            cuda_graph_max_bs cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
            cuda_graph_prefill_max_context dcp_size decode_log_interval decoupled_spec_rank default_priority_value
            detokenizer_worker_num disaggregation_bootstrap_port disaggregation_decode_extra_slots
            disaggregation_decode_polling_interval dist_timeout dp_size dsa_triton_union dwdp_size
            dynamic_batch_tokenizer_batch_size elastic_ep_initial_size encoder_bootstrap_port
            engine_info_bootstrap_port ep_join_rank_offset ep_num_redundant_experts ep_size
            eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations expert_distribution_recorder_buffer_size
            fuseep_mode gated_launch_port grpc_http_sidecar_port grpc_port grpc_response_timeout_secs hicache_size
            hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
            http2_initial_connection_window_size http2_max_concurrent_streams int8_mamba_ckpt_size kt_cpuinfer
            kt_max_deferred_experts_per_token kt_num_gpu_experts kt_threadpool_count kv_canary_sweep_interval
            linear_replayssm_cache_len load_snapshot_publish_interval log_requests_level mamba_cache_philox_rounds
            mamba_max_states_per_path mamba_track_interval max_ep_size max_loaded_loras max_lora_chunk_size
            max_lora_rank max_loras_per_batch max_mamba_cache_size max_prefill_tokens max_queued_requests
            max_running_requests max_total_tokens media_url_max_file_size_mb min_free_slots_delay mm_io_worker_num
            mm_preprocess_cache_size_mb mm_processor_worker_num moe_dense_tp_size moe_dp_size
            num_continuous_decode_steps num_reserved_decode_tokens offload_group_size offload_num_in_group
            offload_prefetch_step optimistic_prefill_attempts optimistic_prefill_retries page_size
            paged_experts_num_resident piecewise_cuda_graph_max_tokens pp_async_batch_depth pp_max_micro_batch_size
            pp_size prefill_decode_interval prefill_decode_interval_min_bs prefill_delayer_max_delay_passes
            prefill_max_requests priority_scheduling_preemption_threshold
            remote_instance_weight_loader_seed_instance_service_port sampling_mask_max_tokens
            scheduler_recv_interval shared_experts_tp_size sm_group_num smg_http_sidecar_port
            speculative_dflash_block_size speculative_dflash_draft_window_size
            speculative_domino_candidate_pool_size speculative_draft_sink_size speculative_draft_window_size
            speculative_dspark_block_size speculative_eagle_topk speculative_ngram_capacity
            speculative_ngram_external_corpus_max_tokens speculative_ngram_external_sam_budget
            speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth
            speculative_num_draft_tokens speculative_num_steps stream_interval swa_prefix_tails tokenizer_worker_num
            torch_compile_max_bs triton_attention_num_kv_splits triton_attention_split_tile_size
            weight_cache_timeout weight_loader_prefetch_num_threads
        """,
        "float": """
            disaggregation_decode_host_receive_threshold dynamic_batch_tokenizer_batch_timeout
            elastic_ep_scale_timeout eplb_min_rebalancing_utilization_threshold gc_warning_threshold_secs
            hicache_host_memory_fraction hicache_ratio lora_drain_wait_threshold mamba_full_memory_ratio
            mem_fraction_static prefill_delayer_max_delay_ms prefill_delayer_queue_min_ratio
            prefill_delayer_token_usage_low_watermark schedule_conservativeness soft_watchdog_timeout
            speculative_accept_threshold_acc speculative_accept_threshold_single swa_full_tokens_ratio
            tbo_token_distribution_threshold watchdog_timeout
        """,
        "flag": """
            abort_on_priority_when_disabled allow_auto_truncate checkpoint_engine_wait_weights_before_ready
            constrained_json_disable_any_whitespace debug_cuda_graph delete_ckpt_after_loading
            disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill
            disable_attn_tp_gather disable_chunked_prefix_cache disable_cuda_graph disable_cuda_graph_padding
            disable_custom_all_reduce disable_decode_cuda_graph disable_fast_image_processor
            disable_flashinfer_autotune disable_flashinfer_cutlass_moe_fp4_allgather disable_hybrid_swa_memory
            disable_outlines_disk_cache disable_overlap_schedule disable_piecewise_cuda_graph
            disable_prefill_cuda_graph disable_priority_preemption disable_radix_cache disable_shared_experts_fusion
            disable_tokenizer_batch_decode disaggregation_decode_enable_offload_kvcache
            disaggregation_decode_enable_radix_cache disaggregation_enable_kv_checksum elastic_ep_rejoin
            enable_adaptive_dispatch_to_encoder enable_aiter_allreduce_fusion enable_amd_monokernel
            enable_attn_tp_input_scattered enable_breakable_cuda_graph enable_broadcast_mm_inputs_process
            enable_cache_report enable_cp_decode_attn_tp enable_cudagraph_gc enable_custom_logit_processor
            enable_deepep_waterfill enable_deepseek_v4_fp4_indexer enable_dense_mlp_attn_tp
            enable_deterministic_inference enable_dp_attention enable_dp_attention_local_control_broadcast
            enable_dp_lm_head enable_draft_weights_cpu_backup enable_dsa_cache_layer_split
            enable_dsa_prefill_context_parallel enable_dynamic_batch_tokenizer enable_dynamic_chunking
            enable_elastic_expert_backup enable_encoder_swa_bounded_replay enable_eplb
            enable_expert_distribution_metrics enable_flashinfer_allreduce_fusion enable_flexkv
            enable_forward_pass_metrics enable_fp32_lm_head enable_fp32_moe_router enable_fused_moe_sum_all_reduce
            enable_hierarchical_cache enable_hisparse enable_http2 enable_http_worker_reuseport
            enable_int8_mamba_checkpoint enable_kv_cache_sharding enable_layernorm_sp enable_layerwise_nvtx_marker
            enable_lean_attention enable_linear_replayssm enable_linear_replayssm_spec enable_linker_mla_dedup
            enable_lmcache enable_lora enable_lora_overlap_loading enable_mamba_cache_stochastic_rounding
            enable_megamoe_for_layernorm_sp enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
            enable_mis enable_mixed_chunk enable_mm_global_cache enable_mscclpp enable_multi_layer_eagle
            enable_multimodal enable_nccl_nvls enable_nsa_prefill_context_parallel enable_nvidia_megakernel
            enable_p2p_check enable_page_major_kv_layout enable_paged_experts enable_pd_role_switch enable_pdmux
            enable_precise_embedding_interpolation enable_prefill_context_parallel enable_prefill_cp
            enable_prefill_delayer enable_prefix_mm_cache enable_priority_scheduling enable_profile_cuda_graph
            enable_quant_communications enable_request_time_stats_logging enable_response_store
            enable_return_aux_hidden_states enable_return_hidden_states enable_return_indexer_topk
            enable_scattered_sconv enable_session_radix_cache enable_shared_experts_attn_tp
            enable_single_batch_overlap enable_ssl_refresh enable_streaming_session enable_strict_thinking
            enable_symm_mem enable_tokenizer_batch_encode enable_torch_compile enable_torch_compile_debug_mode
            enable_torch_symm_mem enable_trace enable_two_batch_overlap enable_unified_cache_external_linker
            enable_unified_memory enable_w4a4_mxfp4_megamoe enable_waterfill enable_watermark
            enable_weights_cpu_backup encoder_only enforce_disable_flashinfer_allreduce_fusion
            enforce_piecewise_cuda_graph enforce_shared_experts_fusion export_metrics_to_file
            flashinfer_mla_disable_ragged grpc_mode incremental_streaming_output is_embedding
            keep_mm_feature_on_device language_model_only language_only log_requests lora_use_virtual_experts
            mlx_enable_sampling pre_warm_nccl prefill_only_disable_kv_cache quantize_and_serve
            remote_instance_weight_loader_start_seed_via_transfer_engine return_input_ids return_output_ids
            schedule_low_priority_values_first show_time_cost skip_tokenizer_init sleep_on_idle smg_grpc_mode
            speculative_adaptive speculative_dspark_align_verify_tokens_to_graph_tier speculative_skip_dp_mlp_sync
            speculative_use_block_verification speculative_use_rejection_sampling stream_output
            stream_response_default_include_usage strip_thinking_cache triton_attention_reduce_in_fp32
            trust_mm_content_hashes trust_request_chat_template use_ray weight_loader_disable_mmap
            weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints
        """,
        "pair": """
            dcp_replicate_q_proj dllm_fdfo enable_decoder_swa_bounded_replay enable_dsa_fused_indexer
            enable_fused_qk_norm_rope enable_tf32_matmul enable_tp_lm_head_all_to_all experts_shared_outer_loras
            lora_strict_loading mm_enable_dp_encoder ple_offload_embedding speculative_enable_w4a4_mxfp4_megamoe
        """,
        "int*": """
            cuda_graph_bs cuda_graph_bs_decode cuda_graph_bs_prefill debug_tensor_dump_layers gc_threshold numa_node
            piecewise_cuda_graph_tokens remote_instance_weight_loader_send_weights_group_ports
            return_aux_hidden_state_layer_ids
        """,
        "float*": """
            bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token
            prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
        """,
        "str*": """
            allowed_media_domains custom_weight_loader encoder_register_urls encoder_urls
            flashinfer_autotune_skip_ops generation_tokens_buckets log_requests_target lora_paths
            lora_target_modules monokernel_backend prompt_tokens_buckets tokenizer_metrics_allowed_custom_labels
            uvicorn_access_log_exclude_prefixes
        """,
        "json": """
            decoupled_spec_connect_endpoints default_chat_template_kwargs extra_metric_labels forward_hooks
            limit_mm_data_per_request mm_process_config preferred_sampling_params radix_eviction_policy_config
            sidecar_args unified_cache_external_linker_config
        """,
    }
)
"""Engine server argument (attribute name) -> kind."""

SGLANG_DEFAULTS: Mapping[str, Any] = {
    name: False if kind in ("flag", "pair") else None for name, kind in SGLANG_FLAGS.items()
} | {
    "asr_max_buffer_seconds": 60, "asr_max_concurrent_sessions": 32, "attn_cp_size": 1, "attn_dp_size": 1,
    "batch_notify_size": 16, "bf16_gemm_backend": "auto", "boundary_reduction": "auto", "c128_page_size": 16,
    "cpu_offload_gb": 0, "dcp_size": 1, "decode_log_interval": 40, "decoupled_spec_role": "null",
    "deepep_dispatcher_output_dtype": "auto", "deepep_mode": "auto", "deepep_v2_mode": "direct",
    "detokenizer_worker_num": 1, "disaggregation_bootstrap_port": 8998, "disaggregation_decode_allocation_policy":
    "early", "disaggregation_decode_host_receive_threshold": 1.0, "disaggregation_decode_polling_interval": 1,
    "disaggregation_mode": "null", "disaggregation_transfer_backend": "mooncake", "dllm_fdfo": True, "dp_size": 1,
    "dsa_paged_mqa_logits_backend": "auto", "dsa_topk_backend": "sgl-kernel", "dsa_triton_union": 0,
    "dsv4_attn_backend": "auto", "dsv4_prefill_backend": "auto", "dtype": "auto", "dwdp_size": 1,
    "dynamic_batch_tokenizer_batch_size": 32, "dynamic_batch_tokenizer_batch_timeout": 0.002,
    "elastic_ep_scale_timeout": 600, "encoder_bootstrap_port": 8997, "encoder_transfer_backend": "auto",
    "engine_info_bootstrap_port": 6789, "ep_join_rank_offset": 0, "ep_num_redundant_experts": 0, "ep_size": 1,
    "eplb_algorithm": "auto", "eplb_min_rebalancing_utilization_threshold": 1.0, "eplb_rebalance_num_iterations":
    1000, "expert_balancedness_report_mode": "off", "flashinfer_mxfp4_moe_precision": "default",
    "fp4_gemm_runner_backend": "auto", "fp8_gemm_runner_backend": "auto", "fuseep_mode": 2,
    "gc_warning_threshold_secs": 0.0, "grpc_response_timeout_secs": 300, "hicache_host_memory_fraction": 0.8,
    "hicache_host_memory_mode": "cache", "hicache_io_backend": "kernel", "hicache_mem_layout": "page_first",
    "hicache_size": 0, "hicache_storage_prefetch_policy": "timeout",
    "hicache_storage_prefetch_retry_max_attempts": 8, "hicache_storage_prefetch_retry_poll_interval": 8,
    "hicache_write_policy": "write_through", "host": "127.0.0.1", "http2_max_concurrent_streams": 200,
    "image_processor_backend": "auto", "init_expert_location": "trivial", "json_model_override_args": "{}",
    "kt_method": "AMXINT4", "kt_threadpool_count": 2, "kv_cache_dtype": "auto", "kv_canary": "none",
    "kv_canary_sweep_interval": 0, "linear_attn_backend": "triton", "linear_replayssm_cache_len": 16,
    "load_balance_method": "auto", "load_format": "auto", "load_snapshot_publish_interval": 15, "log_level":
    "info", "log_requests_format": "text", "log_requests_level": 2, "lora_backend": "csgmv",
    "lora_drain_wait_threshold": 0.0, "lora_eviction_policy": "lru", "mamba_backend": "triton",
    "mamba_cache_philox_rounds": 0, "mamba_max_states_per_path": -1, "mamba_radix_cache_strategy": "auto",
    "mamba_track_interval": 256, "max_lora_chunk_size": 16, "max_loras_per_batch": 8, "max_prefill_tokens": 16384,
    "media_url_max_file_size_mb": 64, "mm_global_cache_backend": "mooncake", "mm_io_worker_num": 0,
    "mm_processor_worker_num": 0, "model_config_parser": "auto", "model_impl": "auto",
    "model_loader_extra_config": "{}", "moe_a2a_backend": "none", "moe_dp_size": 1, "moe_runner_backend": "auto",
    "num_continuous_decode_steps": 1, "num_reserved_decode_tokens": 512, "offload_group_size": -1, "offload_mode":
    "cpu", "offload_num_in_group": 1, "offload_prefetch_step": 1, "optimistic_prefill_attempts": 0,
    "optimistic_prefill_retries": 0, "otlp_traces_endpoint": "localhost:4317", "ple_offload_backend": "pinned",
    "pp_async_batch_depth": 0, "pp_size": 1, "prefill_decode_interval_min_bs": 0,
    "prefill_delayer_max_delay_passes": 30, "prefill_kv_cache_dequant_dtype": "auto",
    "priority_scheduling_preemption_threshold": 10, "qsa_indexer_dtype": "auto", "radix_eviction_policy": "lru",
    "remote_instance_weight_loader_backend": "nccl", "retraction_policy": "length", "sampling_defaults": "model",
    "sampling_mask_max_tokens": 4096, "schedule_conservativeness": 1.0, "schedule_policy": "fcfs",
    "scheduler_recv_interval": 1, "sm_group_num": 8, "speculative_accept_threshold_acc": 1.0,
    "speculative_accept_threshold_single": 1.0, "speculative_attention_mode": "prefill",
    "speculative_domino_candidate_pool_size": 2048, "speculative_dsa_topk_backend": "sgl-kernel",
    "speculative_ngram_external_corpus_max_tokens": 10000000, "speculative_ngram_external_sam_budget": 0,
    "speculative_ngram_match_type": "BFS", "speculative_ngram_max_bfs_breadth": 10,
    "speculative_ngram_max_trie_depth": 18, "speculative_ngram_min_bfs_breadth": 1, "startup_weight_load_mode":
    "serial", "stream_interval": 1, "tbo_token_distribution_threshold": 0.48, "tokenizer_backend": "huggingface",
    "tokenizer_metrics_custom_labels_header": "x-custom-labels", "tokenizer_mode": "auto", "tokenizer_worker_num":
    1, "torch_compile_max_bs": 32, "trace_modules": "request", "triton_attention_num_kv_splits": 8,
    "unified_cache_external_linker_backend": "mooncake", "watchdog_timeout": 300, "weight_cache_mode": "off",
    "weight_cache_timeout": 1800, "weight_loader_prefetch_num_threads": 4, "weight_version": "default",
}  # fmt: skip
"""What an engine argument is when nobody sets it."""

SGLANG_ALIASES: Mapping[str, str] = {
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "ep": "ep_size",
    "moe_data_parallel_size": "moe_dp_size",
    "attention_context_parallel_size": "attn_cp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "decode_context_parallel_size": "dcp_size",
    "speculative_draft_model": "speculative_draft_model_path",
    "fp4_gemm_backend": "fp4_gemm_runner_backend",
    "fp8_gemm_backend": "fp8_gemm_runner_backend",
}
"""Other spelling -> attribute name; both are accepted as flags and both exist on ``args``."""

_OWNED = "is set by slime"
SGLANG_OWNED: Mapping[str, str] = {
    "model_path": "--hf-checkpoint names the model",
    "model": "--hf-checkpoint names the model",
    "config": "use --sglang-config for a deployment file",
    "trust_remote_code": _OWNED,
    "random_seed": "--rollout-seed is the seed of generation",
    "enable_memory_saver": "use --colocate or --offload-rollout",
    "tp_size": "use --rollout-num-gpus-per-engine (divided by --sglang-pp-size)",
    "tensor_parallel_size": "use --rollout-num-gpus-per-engine (divided by --sglang-pp-size)",
    "tp": "use --rollout-num-gpus-per-engine (divided by --sglang-pp-size)",
    "port": _OWNED,
    "nnodes": "follows from --rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node_rank": _OWNED,
    "dist_init_addr": _OWNED,
    "nccl_init_addr": _OWNED,
    "gpu_id_step": _OWNED,
    "base_gpu_id": _OWNED,
    "nccl_port": _OWNED,
    "skip_server_warmup": _OWNED,
    "enable_return_routed_experts": "use --use-rollout-routing-replay",
}
"""Engine arguments that slime sets itself -> what a user changes instead."""

SGLANG_SECRETS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
"""Engine arguments that are never written anywhere."""
