"""``--check-weight-update-equal``: show that the first synchronisation writes every tensor an engine has.

The engines note what they loaded from disk, forget it, and must hold the same after the update: a tensor that no
update reaches stays behind and is named. This holds only where the trainer starts from the weights that the engines
loaded. Tests hold: a tensor that was not sent fails the run, on every kind of engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.engines import api
from slime.errors import WeightSyncError
from slime.http_control import HttpStatusError
from slime.weights.control import EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.engine_answers import ranks_of

_NAMED = 5

_Sums = list[tuple[int, Mapping[str, str]]]


class ResetCheck:
    """One check of a fixed set of engines; they are paused from ``reset`` to ``compare``.

    Args:
        calls: To the engines, which bounds what is asked by the deadline of the update.
    """

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls
        self._loaded: dict[str, _Sums] = {}

    def reset(self) -> None:
        """Let every engine note what it holds, then overwrite it.

        Raises:
            WeightSyncError: An engine cannot.
            EngineError: An engine cannot be reached.
        """

        def forget(endpoint: EngineEndpoint) -> _Sums:
            # SGLang compares tensors on CUDA only: without it, the checksums of what was loaded are kept here.
            loaded = [] if self._compares_by_itself(endpoint) else self._checksums(endpoint)
            if not loaded:
                self._ask(endpoint, "snapshot")
            self._ask(endpoint, "reset_tensors")
            return loaded

        engines = self._calls.endpoints
        self._loaded = {e.url: loaded for e, loaded in zip(engines, self._calls.each(forget), strict=True)}

    def compare(self) -> None:
        """Compare what every engine holds with what it noted.

        Raises:
            WeightSyncError: A tensor is not what was loaded.
            EngineError: An engine cannot be reached.
        """

        def differences(endpoint: EngineEndpoint) -> list[str]:
            loaded = self._loaded[endpoint.url]
            if not loaded:
                self._ask(endpoint, "compare")
                return []
            return [
                f"process {rank}: {name} has checksum {now.get(name)}, {checksum} after loading"
                for (rank, before), (_, now) in zip(loaded, self._checksums(endpoint), strict=True)
                for name, checksum in before.items()
                if now.get(name) != checksum
            ]

        problems: list[str] = []
        for endpoint, different in zip(self._calls.endpoints, self._calls.each(differences), strict=True):
            problems += [f"{endpoint.name}, {text}" for text in different[:_NAMED]]
            if len(different) > _NAMED:
                problems.append(f"{endpoint.name}: {len(different) - _NAMED} more tensors")
        if problems:
            raise WeightSyncError(_explain("\n".join(problems)))

    def _compares_by_itself(self, endpoint: EngineEndpoint) -> bool:
        return endpoint.backend == "embedded" or str(self._calls.server_info(endpoint).get("device")) == "cuda"

    def _checksums(self, endpoint: EngineEndpoint) -> _Sums:
        return ranks_of(endpoint, self._ask(endpoint, "checksum"))

    def _ask(self, endpoint: EngineEndpoint, action: str) -> Any:
        try:
            return self._calls.call(endpoint, api.WEIGHTS_CHECKER, {"action": action})
        except HttpStatusError as error:
            text = f"{action} was refused by {error}"
            raise WeightSyncError(_explain(text) if action == "compare" else text) from None


def _explain(differences: str) -> str:
    return (
        "--check-weight-update-equal: after the first synchronisation engines do not hold what they loaded from disk. "
        "Either an update does not reach every tensor, or the trainer started from other weights than the engines "
        f"(such as a checkpoint of --load); then leave the flag out.\n{differences}"
    )
