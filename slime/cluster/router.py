"""The router process, and what it is told.

``python -m slime.cluster.router JSON`` serves one router through its Python API, which knows
policies that its command line does not offer.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
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


def router_arguments(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Keyword arguments for the installed version's ``RouterArgs``.

    Args:
        values: What ``router_values`` made.
        known: Its fields. One of our presets that it does not have is left out; its own behaviour is what there is.

    Raises:
        ConfigError: A value that the user gave is not one of its fields.
    """
    unknown = sorted(set(values) - set(known) - set(ROUTER_PRESETS))
    if unknown:
        raise ConfigError(f"the installed sglang-router has no --router-{unknown[0].replace('_', '-')}")
    arguments = {name: value for name, value in values.items() if name in known}
    for name, read in _WRITTEN_FORMS.items():
        if arguments.get(name):
            arguments[name] = read(arguments[name])
    return arguments


def _api_keys(texts: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """``id:name:role:key`` as the tuples of the Python API, which has the key before the role."""
    parts = [text.split(":", 3) for text in texts]
    wrong = [":".join(part[:3]) for part in parts if len(part) != 4]
    if wrong:
        raise ConfigError(f"--router-control-plane-api-keys {wrong[0]}: write id:name:role:key")
    return [(key_id, name, key, role) for key_id, name, role, key in parts]


def _role_mapping(texts: Sequence[str]) -> dict[str, str]:
    """``theirs=ours`` pairs."""
    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise ConfigError(f"--router-jwt-role-mapping {wrong[0]}: write identity-provider-role=router-role")
    return dict(text.split("=", 1) for text in texts)


_WRITTEN_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "control_plane_api_keys": _api_keys,
    "jwt_role_mapping": _role_mapping,
}
"""Argument whose flag is written otherwise than the Python API takes it."""


def main(text: str) -> None:
    """Serve until ended.

    Raises:
        ConfigError: A value is not one of the installed router's.
    """
    module: Any = importlib.import_module("sglang_router.router_args")
    router: Any = importlib.import_module("sglang_router.router")
    arguments = router_arguments(json.loads(text), module.RouterArgs.__dataclass_fields__)
    router.Router.from_args(module.RouterArgs(**arguments)).start()


if __name__ == "__main__":
    main(sys.argv[1])
