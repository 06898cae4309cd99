"""Prove that engines hold the weights that were sent: the checksums they compute over them are the expected ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime.engines import api
from slime.errors import WeightSyncError
from slime.http_control import in_parallel, request
from slime.weights.checksum import tensor_checksum
from slime.weights.endpoint import EngineEndpoint
from slime.weights.report import Bucket

logger = logging.getLogger(__name__)

_CHECKSUM_DIGITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What one check found out."""

    verified: int

    @property
    def metrics(self) -> dict[str, float]:
        """Under their metric names."""
        return {}


class WeightVerifier:
    """Checks a fixed set of engines after every update.

    Args:
        endpoints: The engines.
        timeout_seconds: For each HTTP call.
    """

    def __init__(self, endpoints: Sequence[EngineEndpoint], *, timeout_seconds: float) -> None:
        self._urls = [endpoint.url for endpoint in endpoints]
        self._timeout = timeout_seconds
        self._sent: dict[str, str] = {}
        self._held_version = api.INITIAL_WEIGHT_VERSION

    def begin(self) -> None:
        """Forget the tensors of an earlier update."""
        self._sent = {}

    @contextlib.contextmanager
    def adding(self, bucket: Bucket) -> Generator[None]:
        """Take tensors that are sent."""
        yield
        self._sent |= {name: tensor_checksum(tensor.cpu()) for name, tensor in bucket}

    def check(self, version: str, *, send_seconds: float) -> Verification:
        """Compare what was sent with what each engine holds.

        SGLang names the fused tensors it holds, so only the others can be compared there.
        """
        problems: list[str] = []
        compared = 0

        def ask(url: str) -> Any:
            path, body = url + api.WEIGHTS_CHECKER, {"action": "checksum"}
            return request(path, body, timeout_seconds=self._timeout, waiter="the trainer")

        for url, reply in zip(self._urls, in_parallel(ask, self._urls), strict=True):
            held = cast("dict[str, str]", reply["ranks"][0]["checksums"])
            is_ours = "model.embed_tokens.weight" in held and len(next(iter(held.values()))) == _CHECKSUM_DIGITS
            names = [name for name in self._sent if name in held] if is_ours else []
            if len(names) < len(self._sent):
                logger.warning("%s: %d of %d tensors can be verified", url, len(names), len(self._sent))
            compared += len(names)
            different = [name for name in names if held[name] != self._sent[name]]
            if different:
                problems.append(
                    f"{url} holds other values than version {version} for {len(different)} of {len(names)} tensors "
                    f"(it had version {self._held_version}), such as {different[0]}: "
                    f"sent {self._sent[different[0]]}, held {held[different[0]]}"
                )
        if problems:
            raise WeightSyncError("\n".join(problems))
        self._held_version = version
        return Verification(verified=compared)
