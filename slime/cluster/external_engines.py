"""Engines that ran before this run, as its router and its trainer are told of them."""

from __future__ import annotations

import socket
from typing import Literal
from urllib.parse import urlsplit

import ray

from slime.cluster.registration import Registration
from slime.config import Config
from slime.weights.endpoint import EngineEndpoint


def external_registrations(config: Config) -> list[Registration]:
    """What the router is told."""
    return [
        Registration(url=engine.url, worker_type=engine.worker_type, bootstrap_port=engine.bootstrap_port)
        for engine in config.external_engines
    ]


def external_endpoints(config: Config) -> tuple[EngineEndpoint, ...]:
    """What those are told who bring weights; an engine of this machine has its node."""
    endpoints: list[EngineEndpoint] = []
    for number, engine in enumerate(config.external_engines):
        backend: Literal["embedded", "sglang"] = "embedded" if engine.backend == "embedded" else "sglang"
        endpoints.append(
            EngineEndpoint(
                url=engine.url,
                name=f"external engine {number}",
                backend=backend,
                num_gpus=engine.num_gpus,
                node_id=ray.get_runtime_context().get_node_id() if _is_here(engine.url) else None,
                model_path=engine.model_path,
                local_dir=config.weights.update_weight_local_checkpoint_dir,
            )
        )
    return tuple(endpoints)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses & {"127.0.0.1", "::1", str(ray.util.get_node_ip_address())})
