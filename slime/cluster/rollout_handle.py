"""The driver's side of the rollout process; every call is bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from slime.cluster import waits
from slime.cluster.actor import ActorSetting
from slime.cluster.rollout import CONTROL_GROUP, RolloutManager, RolloutReport, Rows
from slime.config import Config
from slime.errors import EngineError, SlimeError


class RolloutHandle:
    """Calls the rollout process and waits for it."""

    def __init__(self, config: Config, log_dir: Path, facts: dict[str, Any], *, manager: type = RolloutManager) -> None:
        """Start the process.

        Args:
            config: Resolved configuration.
            log_dir: Where ``rollout.log`` is written.
            facts: See ``RolloutManager``.
            manager: The class to host.
        """
        self._config = config
        self._setting = ActorSetting.of("rollout", log_dir)
        actor_class: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 1})(manager)
        self.actor = actor_class.options(**waits.on_this_node()).remote(self._setting, config, facts)
        self._check: Callable[[], None] = lambda: None
        self._asked: Any = None
        self._closed = False

    def watch(self, check: Callable[[], None]) -> None:
        """Call ``check`` while waiting; it raises when an engine is gone."""
        self._check = check

    def start(self) -> int | None:
        """Read data, load plug-ins; returns rollouts per epoch, or None where the data does not say."""
        return self._wait(self.actor.start.remote(), "read the data", self._limit)

    def load(self, rollout_id: int) -> None:
        """Continue with the data after ``rollout_id``."""
        self._wait(self.actor.load.remote(rollout_id), f"load the data state of rollout {rollout_id}", self._limit)

    def submit(self, rollout_id: int) -> tuple[Any, Any]:
        """Begin rollout ``rollout_id``; references to its batch and its report."""
        return self.actor.generate.options(num_returns=2).remote(rollout_id)

    def report(self, reference: Any, rollout_id: int) -> RolloutReport:
        """Wait for a rollout that was begun."""
        return self._wait(reference, f"generate rollout {rollout_id}", self._limit)

    def evaluate(self, rollout_id: int) -> tuple[dict[str, float], Rows]:
        """Score the held-out sets."""
        return self._wait(self.actor.evaluate.remote(rollout_id), "evaluate", self._limit)

    def suspects(self) -> dict[str, str]:
        """Engines that requests get bad answers from, and the fault: of the last question. Never blocks."""
        if self._asked is None:
            self._asked = self.actor.suspects.remote()
        if not ray.wait([self._asked], timeout=0)[0]:
            return {}
        asked, self._asked = self._asked, None
        try:
            return waits.get(asked, waited_for="the rollout process to name bad engines", timeout_seconds=0.0)
        except SlimeError:  # it died, which is told where its rollout is waited for
            return {}

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End the process."""
        if self._closed:
            return
        self._closed = True
        ray.wait([self.actor.close.remote()], timeout=timeout_seconds)
        ray.kill(self.actor)

    @property
    def _limit(self) -> float:
        return self._config.cluster.rollout_timeout_seconds

    def _wait(self, reference: Any, doing: str, limit: float) -> Any:
        try:
            return waits.get(
                reference,
                waited_for=f"the rollout process to {doing}",
                timeout_seconds=limit,
                check=self._check,
                on_death=lambda _: self._death(doing),
            )
        except SlimeError:
            self._check()  # a dead engine explains more than the request that failed because of it
            raise

    def _death(self, doing: str) -> SlimeError:
        return EngineError(f"the rollout process died while it was to {doing}; {self._setting.log_tail()}")
