"""The router process, and what it is told.

``python -m slime.cluster.router JSON`` serves one router through its Python API, which knows
policies that its command line does not offer.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from slime.config import Config
from slime.config.router_flags import ROUTER_PRESETS
from slime.errors import ConfigError


def router_values(
    config: Config, *, host: str, port: int, prometheus_port: int, disaggregated: bool = False
) -> dict[str, Any]:
    """Keyword arguments of ``RouterArgs``: presets, then what the user gave.

    Args:
        config: Resolved configuration.
        host: Address to bind.
        port: Port to bind.
        prometheus_port: For its metrics.
        disaggregated: Whether prefill and decode are different engines.
    """
    return {
        **ROUTER_PRESETS,
        "request_timeout_secs": config.engine.sglang_router_request_timeout_secs,
        "prometheus_port": prometheus_port,
        "prometheus_host": "127.0.0.1" if host == "127.0.0.1" else "0.0.0.0",
        **config.router,
        "pd_disaggregation": disaggregated,
        "host": host,
        "port": port,
    }


def router_command(values: Mapping[str, Any]) -> list[str]:
    """Command line of the router process."""
    return [sys.executable, "-m", "slime.cluster.router", json.dumps(dict(values))]


def main(text: str) -> None:
    """Serve until ended.

    Raises:
        ConfigError: A value is not one of the installed router's.
    """
    arguments: Any = importlib.import_module("sglang_router.router_args")
    router: Any = importlib.import_module("sglang_router.router")
    values = json.loads(text)
    known = set(arguments.RouterArgs.__dataclass_fields__)
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"the installed sglang-router has no --router-{unknown[0].replace('_', '-')}")
    router.Router.from_args(arguments.RouterArgs(**values)).start()


if __name__ == "__main__":
    main(sys.argv[1])
