"""The router's public flags as recorded data, and slime's own defaults for them.

With ``sglang-router`` installed its own parser decides (``engine_families``). Recorded from 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.engine_flags import Kind, flag_table

ROUTER_FLAGS: Mapping[str, Kind] = flag_table(
    {
        "str": """
            policy prefill_policy decode_policy assignment_mode log_dir log_level prometheus_host
            service_discovery_namespace health_check_endpoint model_path tokenizer_path chat_template
            reasoning_parser tool_call_parser mcp_config_path backend history_backend oracle_wallet_path
            oracle_tns_alias oracle_connect_descriptor oracle_username oracle_password postgres_db_url redis_url
            client_cert_path client_key_path server_cert_path server_key_path otlp_traces_endpoint api_key jwt_issuer
            jwt_audience jwt_jwks_uri
        """,
        "int": """
            balance_abs_threshold bucket_adjust_interval_secs eviction_interval_secs max_tree_size max_idle_secs
            max_payload_size worker_startup_timeout_secs worker_startup_check_interval prometheus_port
            service_discovery_port shutdown_grace_period_secs max_concurrent_requests queue_size queue_timeout_secs
            rate_limit_tokens_per_second retry_max_retries retry_initial_backoff_ms retry_max_backoff_ms
            cb_failure_threshold cb_success_threshold cb_timeout_duration_secs cb_window_duration_secs
            health_failure_threshold health_success_threshold health_check_timeout_secs health_check_interval_secs
            tokenizer_cache_l0_max_entries tokenizer_cache_l1_max_memory oracle_pool_min oracle_pool_max
            oracle_pool_timeout_secs postgres_pool_max redis_pool_max redis_retention_days
        """,
        "float": "cache_threshold balance_rel_threshold retry_backoff_multiplier retry_jitter_factor",
        "flag": """
            dp_aware enable_igw service_discovery disable_retries disable_circuit_breaker disable_health_check
            tokenizer_cache_enable_l0 tokenizer_cache_enable_l1 enable_trace control_plane_audit_enabled
        """,
        "float*": "prometheus_duration_buckets",
        "str*": "request_id_headers cors_allowed_origins ca_cert_paths control_plane_api_keys jwt_role_mapping",
    }
)
"""Router argument (attribute of its Python API) -> how its value is written."""

ROUTER_POLICIES = (
    "random",
    "round_robin",
    "cache_aware",
    "power_of_two",
    "manual",
    "consistent_hashing",
    "prefix_hash",
)

ROUTER_CHOICES: Mapping[str, tuple[str, ...]] = {
    "policy": ROUTER_POLICIES,
    "prefill_policy": (*ROUTER_POLICIES, "bucket"),
    "decode_policy": ROUTER_POLICIES,
}
"""Accepted values: what the router's Python API has, which its own command line does not offer in full."""

ROUTER_PRESETS: Mapping[str, Any] = {
    # Prompts arrive as token ids, which defeats the text tree of the router's own default, cache_aware: it
    # would send everything to one worker.
    "policy": "round_robin",
    "log_level": "warn",
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    # Pauses for weight updates must not count as failures.
    "disable_health_check": True,
    "disable_circuit_breaker": True,
}
"""What a router argument is when the user does not set it, where that differs from the router's own default."""

ROUTER_DEFAULTS: Mapping[str, Any] = {
    **{name: False if kind == "flag" else None for name, kind in ROUTER_FLAGS.items()},
    "cache_threshold": 0.3,
    **ROUTER_PRESETS,
}
"""What ``args.router_*`` are when nobody sets them."""

ROUTER_SECRETS = frozenset({"api_key", "control_plane_api_keys", "oracle_password", "postgres_db_url", "redis_url"})
"""Router arguments that are never written anywhere."""

ROUTER_OWNED: Mapping[str, str] = {
    "host": "is set by slime",
    "port": "use --sglang-router-port",
    "worker_urls": "engines register themselves; use --rollout-external-engine-addrs for engines that already run",
    "request_timeout_secs": "use --sglang-router-request-timeout-secs",
    "prefill": "use --sglang-config",
    "decode": "use --sglang-config",
    "mini_lb": "is set by slime",
    "pd_disaggregation": "use --sglang-config",
    "selector": "workers are not discovered through Kubernetes",
    "prefill_selector": "workers are not discovered through Kubernetes",
    "decode_selector": "workers are not discovered through Kubernetes",
}
"""Router arguments that slime sets itself -> what a user changes instead."""
