"""Weights brought to engines through files: published once, pulled by the hosts, loaded while generation is paused.

Owns the order, whatever is published: write, post-write hook on every rank, pull while generation goes on, pause,
flush, load, verify, continue. What is written is the publisher's: a whole checkpoint (``disk``) or a delta (``delta``).
Only rank 0 gets whole tensors, so it alone writes. Tests hold: a failure of one rank ends the update on all of them,
and leaves no engine paused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from slime.engines import api
from slime.errors import EngineError, PluginError, SlimeError, WeightSyncError
from slime.http_control import HttpStatusError
from slime.weights.bracket import UpdateBracket
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.pull_request import PullRequest
from slime.weights.report import Bucket, Receivers, SyncReport
from slime.weights.streamed import Verifier
from slime.weights.team import RankTeam

logger = logging.getLogger(__name__)

POST_WRITE_FLAG = "--custom-update-weight-post-write-path"

PostWriteHook = Callable[[str, Sequence[EngineEndpoint]], object]
"""Called with the version's directory and the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version on the shared disk.

    Args:
        directory: Where it is.
        is_new: Whether this call wrote it.
        pull: What brings a host up to it, with the local directory left open; None where engines read ``directory``.
        wire_bytes: Bytes written.
        tensors: Tensors of the model.
        metrics: Further numbers.
    """

    directory: Path
    is_new: bool
    pull: PullRequest | None
    wire_bytes: int
    tensors: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class Publisher(Protocol):
    """Writes versions; on rank 0 only."""

    def publish(self, buckets: Iterable[Bucket], version: int) -> Published:
        """Write a version; exhausts ``buckets``.

        Raises:
            WeightSyncError: It cannot be written.
        """
        ...

    def loaded(self, published: Published) -> None:
        """Every engine has it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """How versions get from the disk into engines.

    Args:
        timeout_seconds: Bound on one update.
        post_write: Called on every rank after a version was written.
        pause_mode: Chooses the mode for the connected engines; see ``UpdateBracket``.
        verifier: Makes the verifier of the connected engines.
    """

    timeout_seconds: float
    post_write: PostWriteHook | None
    pause_mode: Callable[[Sequence[EngineEndpoint]], api.PauseMode]
    verifier: Callable[[EngineCalls], Verifier] | None


class FileUpdater:
    """One rank's part; see ``WeightUpdater``.

    Args:
        settings: How.
        publisher: Makes the publisher; called on rank 0 alone.
        rank: This process.
        world_size: Training processes.
    """

    receivers: Receivers = "first"

    def __init__(
        self, settings: FileSettings, publisher: Callable[[], Publisher], *, rank: int, world_size: int
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._deadline = Deadline(settings.timeout_seconds)
        self._world_size = world_size
        self._publisher = publisher() if rank == 0 else None
        self._team: RankTeam[Any] | None = None
        self._endpoints: tuple[EngineEndpoint, ...] = ()
        self._bracket: UpdateBracket | None = None
        self._verifier: Verifier | None = None

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Take these engines from now on, instead of those before."""
        self.close()
        self._endpoints = tuple(endpoints)
        self._deadline.restart()
        self._team = RankTeam(range(self._world_size), rank=self._rank, deadline=self._deadline)
        if endpoints and self._rank == 0:
            calls = EngineCalls(endpoints, self._deadline)
            mode = self._settings.pause_mode(endpoints)
            self._bracket = UpdateBracket(calls, pause_mode=mode, has_session=False)
            self._verifier = self._settings.verifier(calls) if self._settings.verifier else None

    def update(self, buckets: Iterable[Bucket], version: str) -> SyncReport:
        """Bring every engine to new weights; every rank exhausts ``buckets``."""
        started = time.monotonic()
        self._deadline.restart()
        published = self._publish(buckets, version)
        if published.is_new:
            self._post_write(published.directory)
        written = time.monotonic()
        if self._publisher is None:
            return SyncReport(seconds=0.0, bytes=0, tensors=0, verified=0)
        if published.pull is not None:
            self._pull(published.pull)
        pulled = time.monotonic()
        report = self._load(published, version)
        self._publisher.loaded(published)
        times = {"perf/update_weights_write_time": written - started}
        if published.pull is not None:
            times["perf/update_weights_pull_time"] = pulled - written
        return replace(report, metrics={**times, **published.metrics, **report.metrics})

    def close(self) -> None:
        """Free what is held; a second call does nothing."""
        if self._team is not None:
            self._team.close()
        self._team = self._bracket = self._verifier = None
        self._endpoints = ()

    def _publish(self, buckets: Iterable[Bucket], version: str) -> Published:
        """Write on rank 0 while the others contribute their shards; what was written, on every rank."""
        found: Published | SlimeError | None = None
        remaining = iter(buckets)
        try:
            if self._publisher is not None:
                if self._verifier is not None:
                    self._verifier.begin()
                found = self._publisher.publish(self._noted(remaining), int(version))
        except SlimeError as error:
            found = error
        for _ in remaining:  # gathering is collective, also after a failure here
            pass
        return self._agree(found, "write the weights")

    def _noted(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in buckets:
            if self._verifier is not None:
                with self._verifier.adding(bucket):
                    yield bucket
            else:
                yield bucket

    def _post_write(self, directory: Path) -> None:
        """Call the user's hook on every rank and wait for all of them."""
        hook = self._settings.post_write
        if hook is None:
            return
        failure: SlimeError | None = None
        try:
            hook(str(directory), self._endpoints)
        except Exception as error:  # noqa: BLE001 - plug-in boundary: user code may raise anything
            failure = PluginError(f"{POST_WRITE_FLAG} failed for {directory}: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._agree(failure, "finish the hook after writing")

    def _agree(self, mine: Any, doing: str) -> Any:
        """Rank 0's result on every rank, or the first failure of any rank."""
        assert self._team is not None, "connected"
        results = self._team.exchange(mine, doing)
        if isinstance(mine, SlimeError):
            raise mine
        for rank, result in enumerate(results):
            if isinstance(result, SlimeError):
                raise WeightSyncError(f"trainer rank {rank}: {result}")
        return results[0]

    def _pull(self, request: PullRequest) -> None:
        """Have every host bring its directory up to the version; one that refused starts from the base once."""

        def pull(endpoint: EngineEndpoint) -> None:
            if endpoint.pull is None or endpoint.local_dir is None:
                raise WeightSyncError(
                    f"{endpoint.name}: no process of this run is on its host to write the local checkpoint; leave out "
                    "--update-weight-local-checkpoint-dir, which delta updates need"
                )
            asked = replace(request, local_dir=str(Path(endpoint.local_dir).absolute()))
            try:
                endpoint.pull(replace(asked, timeout_seconds=self._deadline.seconds_left))
            except WeightSyncError as error:
                logger.warning("%s: %s; trying again from the base", endpoint.name, error)
                try:
                    endpoint.pull(replace(asked, timeout_seconds=self._deadline.seconds_left))
                except WeightSyncError as again:
                    raise WeightSyncError(f"{endpoint.name}: {again}") from None

        EngineCalls(self._endpoints, self._deadline).each(pull)

    def _load(self, published: Published, version: str) -> SyncReport:
        """Pause the engines, have them load the version, let them go on."""
        assert self._bracket is not None, "rank 0 is connected"
        calls = EngineCalls(self._endpoints, self._deadline)
        found: dict[str, float] = {}
        verified = 0

        def load(endpoint: EngineEndpoint) -> None:
            path = published.directory if published.pull is None else Path(endpoint.local_dir or "")
            body = {"model_path": str(path.absolute()), "weight_version": version, "flush_cache": False}
            try:
                reply: Any = calls.call(endpoint, api.UPDATE_WEIGHTS_FROM_DISK, body)
            except HttpStatusError as error:
                raise WeightSyncError(
                    f"version {version} from {path}: {error} (the engine's host must see this directory)"
                ) from None
            if not (isinstance(reply, dict) and cast("dict[str, Any]", reply).get("success")):
                raise EngineError(f"{endpoint.name} answered {api.UPDATE_WEIGHTS_FROM_DISK} with {reply!r:.300}")

        def check(version: str, *, send_seconds: float) -> None:
            nonlocal verified
            if self._verifier is not None:
                findings = self._verifier.check(version, send_seconds=send_seconds)
                verified = findings.verified
                found.update(findings.metrics)

        reset = self._verifier.reset if self._verifier is not None else None
        with self._bracket.opened(version, check, when_quiet=reset):
            calls.each(load)
        times = self._bracket.times
        assert times is not None, "set when the bracket closes"
        return SyncReport(
            seconds=times.total,
            bytes=published.wire_bytes,
            tensors=published.tensors,
            verified=verified,
            metrics={**times.metrics, **found},
        )
