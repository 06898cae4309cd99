"""``--check-weight-update-equal``: show that the first synchronisation writes every tensor an engine has.

The engines note what they loaded from disk, forget it, and must hold the same after the update: a tensor that no
update reaches stays behind and is named. This holds only where the trainer starts from the weights that the engines
loaded. Tests hold: a tensor that was not sent fails the run, on every kind of engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from slime.engines import api
from slime.errors import WeightSyncError
from slime.http_control import HttpStatusError, in_parallel, request
from slime.weights.endpoint import EngineEndpoint
from slime.weights.engine_answers import ranks_of

_NAMED = 5

_Sums = list[tuple[int, Mapping[str, str]]]


class ResetCheck:
    """One check of a fixed set of engines; they are paused from ``reset`` to ``compare``.

    Args:
        endpoints: The engines.
        timeout_seconds: For each HTTP call.
    """

    def __init__(self, endpoints: Sequence[EngineEndpoint], *, timeout_seconds: float) -> None:
        self._endpoints = {endpoint.url: endpoint for endpoint in endpoints}
        self._timeout = timeout_seconds
        self._loaded: dict[str, _Sums] = {}

    def reset(self) -> None:
        """Let every engine note what it holds, then overwrite it.

        Raises:
            WeightSyncError: An engine cannot.
            EngineError: An engine cannot be reached.
        """

        def forget(url: str) -> _Sums:
            # SGLang compares tensors on CUDA only: without it, the checksums of what was loaded are kept here.
            loaded = [] if self._compares_by_itself(url) else ranks_of(self._endpoints[url], self._ask(url, "checksum"))
            if not loaded:
                self._ask(url, "snapshot")
            self._ask(url, "reset_tensors")
            return loaded

        self._loaded = dict(zip(self._endpoints, in_parallel(forget, list(self._endpoints)), strict=True))

    def compare(self) -> None:
        """Compare what every engine holds with what it noted.

        Raises:
            WeightSyncError: A tensor is not what was loaded.
            EngineError: An engine cannot be reached.
        """

        def differences(url: str) -> list[str]:
            loaded = self._loaded[url]
            if not loaded:
                self._ask(url, "compare")
                return []
            held = ranks_of(self._endpoints[url], self._ask(url, "checksum"))
            return [
                f"process {rank}: {name} has checksum {now.get(name)}, {checksum} after loading"
                for (rank, before), (_, now) in zip(loaded, held, strict=True)
                for name, checksum in before.items()
                if now.get(name) != checksum
            ]

        problems: list[str] = []
        for url, different in zip(self._endpoints, in_parallel(differences, list(self._endpoints)), strict=True):
            problems += [f"{self._endpoints[url].name}, {text}" for text in different[:_NAMED]]
            if len(different) > _NAMED:
                problems.append(f"{self._endpoints[url].name}: {len(different) - _NAMED} more tensors")
        if problems:
            raise WeightSyncError(_explain("\n".join(problems)))

    def _compares_by_itself(self, url: str) -> bool:
        info = request(url + api.SERVER_INFO, timeout_seconds=self._timeout, waiter="the trainer")
        is_ours = self._endpoints[url].backend == "embedded"
        return is_ours or str(cast("dict[str, Any]", info).get("device")) == "cuda"

    def _ask(self, url: str, action: str) -> Any:
        try:
            return request(
                url + api.WEIGHTS_CHECKER, {"action": action}, timeout_seconds=self._timeout, waiter="the trainer"
            )
        except HttpStatusError as error:
            name = self._endpoints[url].name
            text = f"{name} refused {action}: {error}"
            raise WeightSyncError(_explain(text) if action == "compare" else text) from None


def _explain(differences: str) -> str:
    return (
        "--check-weight-update-equal: after the first synchronisation engines do not hold what they loaded from disk. "
        "Either an update does not reach every tensor, or the trainer started from other weights than the engines "
        f"(such as a checkpoint of --load); then leave the flag out.\n{differences}"
    )
