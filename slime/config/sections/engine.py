"""The inference engines and how they are talked to."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Section):
    """Engines."""

    rollout_backend: str = flag(
        "auto",
        choices=("auto", "embedded", "sglang"),
        doc="Inference engine. auto: SGLang on CUDA devices where it is installed, else the embedded engine.",
    )
    sglang_router_ip: str | None = flag(None, doc="Router that already runs. Default: one is started.")
    sglang_router_port: int | None = flag(
        None, at_least=1, at_most=65535, doc="Port of the router, also of one that is started."
    )
    sglang_router_request_timeout_secs: int = flag(14400, at_least=1, doc="Bound on a request in the router.")
    sglang_server_concurrency: int = flag(
        512, at_least=1, doc="Requests in flight per engine; the client allows this times the number of engines."
    )
    prefill_num_servers: int | None = flag(
        None, at_least=1, doc="Engines that only prefill, the others only decode; with the SGLang engine."
    )
    sglang_config: str | None = flag(
        None, metavar="YAML", doc="Deployment of several models and engine groups: docs/engines.md."
    )
    http_proxy: str | None = flag(None, doc="Proxy for requests to the engines.")
    use_distributed_post: bool = flag(False, doc="Spread requests to the engines over one process per node.")
    http_connect_timeout_seconds: float = flag(10.0, above=0, doc="Bound on connecting to an engine or the router.")
    http_request_timeout_seconds: float = flag(
        3600.0, above=0, doc="Bound on one generation request, queueing included."
    )
    http_control_timeout_seconds: float = flag(
        120.0, above=0, doc="Bound on a control request (pause, flush, health, abort)."
    )
    http_max_retries: int = flag(
        5, at_least=0, doc="Retries of a request after a refused connection, a time-out, 429 or 5xx."
    )
    engine_start_timeout_seconds: float = flag(900.0, above=0, doc="Bound on starting all engines and the router.")
    abort_timeout_seconds: float = flag(
        60.0, above=0, doc="Bound on ending the requests that are left when a rollout is complete."
    )
