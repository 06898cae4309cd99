"""Bringing every engine to the trainer's weights, seen from the driver.

Owns which engines the trainer is connected to, and what happens when one dies meanwhile. Tests hold: changed engines
are connected anew; an engine on another version is an error; a sync that failed because an engine died is made again
with its replacement; between two tries nobody lets engines go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from slime.cluster.actor_critic import ActorCritic
from slime.cluster.engines import EngineGroup
from slime.cluster.recovery import Recovery
from slime.cluster.released_trainer import ReleasedTrainer
from slime.cluster.trainer import TrainerGroup
from slime.errors import SlimeError, WeightSyncError
from slime.weights.bracket import release
from slime.weights.endpoint import EngineEndpoint

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_ENGINES_RELEASE_SECONDS = 2.0  # after a failed update: the rank that paused them may be gone


class WeightSync:
    """The way of the weights from a trainer to the engines.

    Args:
        group: The trainer.
        engines: The engines.
        recovery: Replaces engines that die meanwhile; None where nobody does.
        prepare: Has everything replaced that died and both sides ready, before another try.
        idle_seconds: How long a failed try may take to end on all ranks before the next one.
    """

    def __init__(
        self,
        group: TrainerGroup | ActorCritic | ReleasedTrainer,
        engines: EngineGroup,
        recovery: Recovery | None,
        *,
        prepare: Callable[[], None],
        idle_seconds: float,
    ) -> None:
        self._group = group
        self._engines = engines
        self._recovery = recovery
        self._prepare = prepare
        self._idle_seconds = idle_seconds
        self._connected: tuple[EngineEndpoint, ...] = ()

    def send(self) -> dict[str, float]:
        """Send the weights to every engine and verify the version; metrics of the transfer.

        After a failure engines may hold parts of two versions, so they go on only when there will be no other try.

        Raises:
            WeightSyncError: An engine reports another version than the trainer sent.
            SlimeError: What else kept the weights from arriving.
        """
        with self._engines.getting_weights():
            try:
                return self._try_to_send()
            except SlimeError:
                release(self._engines.endpoints, has_session=True, timeout_seconds=_ENGINES_RELEASE_SECONDS)
                raise

    def _try_to_send(self) -> dict[str, float]:
        """Send again as long as a failure is the end of a server that can be replaced."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._send()
            except SlimeError as error:
                self._connected = ()  # what led to the engines may be broken
                if attempt == _ATTEMPTS or self._recovery is None or not self._recovery.found_cause():
                    raise
                logger.warning("the weight sync is made again: %s", str(error).splitlines()[0])
                self._group.drain(self._idle_seconds)
                self._prepare()
        raise AssertionError("the last attempt returns or raises")

    def _send(self) -> dict[str, float]:
        endpoints = self._engines.endpoints
        check = self._engines.check if self._recovery is None else self._check
        if endpoints != self._connected:
            self._connected = ()
            self._group.connect_engines(endpoints, check)
            self._connected = endpoints
        metrics = self._group.update_weights(check=check)
        self._verify_versions()
        return metrics

    def _check(self) -> None:
        """Nothing is to be gained by waiting for a dead engine to take weights, and none serves without a router."""
        assert self._recovery is not None
        if self._recovery.look_while_updating():
            raise WeightSyncError("an engine or a router failed while weights were sent")

    def _verify_versions(self) -> None:
        expected = str(self._group.weight_version())
        versions = self._engines.weight_versions()
        wrong = [
            f"{url} has {version}"
            for url, version in zip(self._engines.urls, versions, strict=True)
            if version != expected
        ]
        if wrong:
            raise WeightSyncError(f"after the sync of weight version {expected}: {', '.join(wrong)}")
