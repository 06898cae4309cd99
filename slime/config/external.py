"""Engines that already run: what they say of themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ADDRESS = re.compile(r"(https?://)?(?P<host>[^\s/:@?#\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})/?")
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngine:
    """One engine of ``--rollout-external-engine-addrs``.

    Args:
        url: Base URL.
        backend: ``sglang`` or ``embedded``.
        num_gpus: Tensor-parallel times pipeline-parallel size.
        worker_type: ``regular``, ``prefill`` or ``decode``.
        model_path: What it serves.
        bootstrap_port: Of a prefill engine, for its decode engines.
    """

    url: str
    backend: str
    num_gpus: int
    worker_type: str
    model_path: str
    bootstrap_port: int | None = None


def external_url(address: str) -> str:
    """Base URL of ``HOST:PORT``, or of an address that is a URL already."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def is_address(text: str) -> bool:
    """Whether an address has the form that ``external_url`` takes."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 1 <= int(found["port"]) <= _LAST_PORT


def read_external(url: str, info: Mapping[str, Any]) -> ExternalEngine:
    """An engine from its ``/server_info``.

    Raises:
        ValueError: It does not say what it must.
    """
    try:
        mode = str(info.get("disaggregation_mode") or "null")
        return ExternalEngine(
            url=url,
            backend="embedded" if info.get("engine") == "embedded" else "sglang",
            num_gpus=int(info["tp_size"]) * int(info.get("pp_size") or 1),
            worker_type="regular" if mode == "null" else mode,
            model_path=str(info["model_path"]),
            bootstrap_port=int(info["disaggregation_bootstrap_port"]) if mode == "prefill" else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its server info has no usable {error}") from None
