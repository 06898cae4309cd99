"""Weights streamed into engines bucket by bucket while they are paused: tensors where memory is shared, else broadcast.

Owns one update from the first rank's pause to its continuation, and which engine is reached how. Every rank has one;
those that only contribute shards drain the buckets, because the gathering behind them is collective. Tests hold: a
failure while sending is raised after the buckets are exhausted, so that no rank is left waiting in a collective.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import torch

from slime.engines import api
from slime.engines.features import features_of
from slime.errors import SlimeError, WeightSyncError
from slime.weights.bracket import UpdateBracket
from slime.weights.broadcast import BroadcastChannel
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.flat import pieces_of
from slime.weights.precision import held_dtype, stated_dtype
from slime.weights.report import Bucket, Receivers, SyncReport
from slime.weights.team import RankTeam
from slime.weights.transport import TensorChannel

T = TypeVar("T")

_PIECES_PER_BUCKET = 2
"""One is read while the next is laid out; both together are a bucket."""


class Channel(Protocol):
    """One way to some engines, on one rank."""

    peak_bytes: int

    def begin(self) -> None:
        """Start an update."""
        ...

    def start(self, piece: Bucket, version: str) -> None:
        """Begin to bring a piece, which may be freed afterwards."""
        ...

    def finish(self) -> None:
        """Wait until everything has arrived, and raise what failed."""
        ...

    def close(self) -> None:
        """Free what is held."""
        ...


class Findings(Protocol):
    """What a verification found."""

    @property
    def verified(self) -> int:
        """Comparisons that were equal."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """Under their metric names."""
        ...


class Verifier(Protocol):
    """Compares what was sent with what engines hold."""

    def begin(self) -> None:
        """Forget the tensors of an earlier update."""
        ...

    def reset(self) -> None:
        """Clear quiet engines, where that is part of the proof."""
        ...

    def adding(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Take tensors while the body has them sent."""
        ...

    def check(self, version: str, *, send_seconds: float) -> Findings:
        """Ask the engines; raises WeightSyncError when one holds something else."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How an updater works.

    Args:
        is_cuda: Where the trainer's tensors are.
        shares_memory: Whether engines read the trainer's memory where they can.
        timeout_seconds: Bound on one update.
        bucket_bytes: Memory that an update takes on a rank besides the bucket that it is given.
        pause_mode: Chooses it for the connected engines; see ``UpdateBracket``.
        verifier: Makes the verifier of the connected engines.
    """

    is_cuda: bool
    shares_memory: bool
    timeout_seconds: float
    bucket_bytes: int
    pause_mode: Callable[[Sequence[EngineEndpoint]], api.PauseMode]
    verifier: Callable[[EngineCalls], Verifier] | None = None


@dataclass(frozen=True, slots=True)
class _Facts:
    """What an engine says of itself."""

    dtype: torch.dtype | None
    num_ranks: int


class StreamedUpdater:
    """See ``WeightUpdater``.

    Args:
        settings: How it works.
        rank: This process.
        world_size: Number of training processes.
    """

    receivers: Receivers

    def __init__(self, settings: StreamSettings, *, rank: int, world_size: int) -> None:
        self._settings = settings
        self._rank = rank
        self._world_size = world_size
        self._deadline = Deadline(settings.timeout_seconds)
        self._team: RankTeam[Any] | None = None
        self._channels: list[Channel] = []
        self._bracket: UpdateBracket | None = None
        self._verifier: Verifier | None = None
        self._findings: Findings | None = None
        self._dtype: torch.dtype | None = None
        self.receivers = "first"

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Take these engines from now on, instead of those before."""
        self.close()
        self._deadline.restart()
        self._team = RankTeam(range(self._world_size), rank=self._rank, deadline=self._deadline)
        if not endpoints:
            return
        calls = EngineCalls(endpoints, self._deadline)
        facts = self._of_first(lambda: calls.each(lambda e: _facts(calls, e)), "ask the engines who they are")
        dtypes = {fact.dtype for fact in facts}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        num_ranks = {e.url: fact.num_ranks for e, fact in zip(endpoints, facts, strict=True)}
        shared = [e for e in endpoints if self._reads_memory(e, num_ranks[e.url])]
        self._share_memory(shared, num_ranks)
        self._of_first(lambda: self._join([e for e in endpoints if e not in shared], num_ranks), "form a group")
        self._of_first(lambda: self._prepare_bracket(calls), "prepare updates")

    def update(self, buckets: Iterable[Bucket], version: str) -> SyncReport:
        """Bring every engine to new weights; every rank exhausts ``buckets``."""
        self._deadline.restart()
        self._findings = None
        total = tensors = 0
        with contextlib.ExitStack() as stack:
            self._agree(self._open(stack, version), "pause the engines")
            for channel in self._channels:
                channel.begin()
            for piece in self._pieces(buckets):
                self._start(piece, version)
                total += sum(tensor.nbytes for _, tensor in piece)
                tensors += len(piece)
            self._agree(self._finish(), "send the weights")
        return self._report(total, tensors)

    def close(self) -> None:
        """Free what is held; a second call does nothing."""
        channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()
        if self._team is not None:
            self._team.close()
        self._team = self._bracket = self._verifier = None
        self.receivers = "first"

    def _prepare_bracket(self, calls: EngineCalls) -> None:
        self._bracket = UpdateBracket(calls, pause_mode=self._settings.pause_mode(calls.endpoints))
        self._verifier = self._settings.verifier(calls) if self._settings.verifier else None

    def _open(self, stack: contextlib.ExitStack, version: str) -> SlimeError | None:
        """On the first rank, let the engines wait until ``stack`` closes."""
        try:
            if self._verifier is not None:
                self._verifier.begin()
            if self._bracket is not None:
                reset = self._verifier.reset if self._verifier is not None else None
                stack.enter_context(self._bracket.opened(version, self._check, when_quiet=reset))
        except SlimeError as error:
            return error
        return None

    def _pieces(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """What is sent at a time, in the dtype the engines hold: half the bytes where that is bfloat16."""
        size = max(self._settings.bucket_bytes // _PIECES_PER_BUCKET, 1)
        for bucket in buckets:
            for piece in pieces_of(bucket, size):
                yield piece if self._dtype is None else [(n, t.to(held_dtype(n, self._dtype))) for n, t in piece]
            del bucket  # it would be held while the next one is gathered

    def _start(self, piece: Bucket, version: str) -> None:
        adding = self._verifier.adding(piece) if self._verifier is not None else contextlib.nullcontext()
        with adding:
            for channel in self._channels:
                channel.start(piece, version)

    def _finish(self) -> SlimeError | None:
        failure: SlimeError | None = None
        for channel in self._channels:
            try:
                channel.finish()
            except SlimeError as error:
                failure = failure or error
        return failure

    def _agree(self, failure: SlimeError | None, doing: str) -> None:
        """Go on together or not at all: raise this rank's failure, else another's."""
        assert self._team is not None, "connected"
        messages = self._team.exchange(None if failure is None else str(failure), doing)
        if failure is not None:
            raise failure
        told = [f"trainer rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        if told:
            raise WeightSyncError(told[0])

    def _of_first(self, function: Callable[[], T], doing: str) -> T:
        """The result that ``function`` has on the first rank, on every rank."""
        assert self._team is not None, "connected"
        result: T | None = None
        failure: SlimeError | None = None
        if self._rank == 0:
            try:
                result = function()
            except SlimeError as error:
                failure = error
        self._agree(failure, doing)
        return cast(T, self._team.exchange(result, doing)[0])

    def _check(self, version: str, *, send_seconds: float) -> None:
        if self._verifier is not None:
            self._findings = self._verifier.check(version, send_seconds=send_seconds)

    def _reads_memory(self, endpoint: EngineEndpoint, num_ranks: int) -> bool:
        """Whether an engine can read the memory of training ranks."""
        if not self._settings.shares_memory:
            return False
        if not self._settings.is_cuda:
            return _is_of_this_host(endpoint)
        if endpoint.trainer_ranks and len(endpoint.trainer_ranks) != num_ranks:
            raise WeightSyncError(
                f"{endpoint.name} has {num_ranks} tensor-parallel processes, {len(endpoint.trainer_ranks)} of its GPUs "
                "have a training rank; make both equal with --rollout-num-gpus-per-engine or "
                "--actor-num-gpus-per-node, or leave out --colocate"
            )
        return bool(endpoint.trainer_ranks)

    def _share_memory(self, endpoints: Sequence[EngineEndpoint], num_ranks: dict[str, int]) -> None:
        """Channels to engines that read memory: of the first rank on a CPU, of their own ranks on GPUs."""
        if not self._settings.is_cuda:
            teams = [((0,), list(endpoints))] if endpoints else []
        else:
            teams = [(endpoint.trainer_ranks, [endpoint]) for endpoint in endpoints]
        for ranks, engines in teams:
            team: RankTeam[list[str] | str] = RankTeam(ranks, rank=self._rank, deadline=self._deadline)
            if team.is_member:
                counts = [num_ranks[engine.url] for engine in engines]
                self._channels.append(TensorChannel(engines, counts, team=team, deadline=self._deadline))
        self.receivers = "first" if all(ranks == (0,) for ranks, _ in teams) else "all"

    def _join(self, endpoints: Sequence[EngineEndpoint], num_ranks: dict[str, int]) -> None:
        if endpoints:
            counts = [num_ranks[endpoint.url] for endpoint in endpoints]
            backend = "nccl" if self._settings.is_cuda else "gloo"
            self._channels.append(BroadcastChannel(endpoints, counts, deadline=self._deadline, backend=backend))

    def _report(self, total: int, tensors: int) -> SyncReport:
        times = self._bracket.times if self._bracket is not None else None
        metrics = dict(times.metrics) if times is not None else {}
        if self._channels:
            metrics["perf/update_weights_buffer_bytes"] = float(sum(c.peak_bytes for c in self._channels))
        if self._findings is not None:
            metrics |= self._findings.metrics
        return SyncReport(
            seconds=times.total if times is not None else 0.0,
            bytes=total,
            tensors=tensors,
            verified=self._findings.verified if self._findings is not None else 0,
            metrics=metrics,
        )


def _facts(calls: EngineCalls, endpoint: EngineEndpoint) -> _Facts:
    features = features_of(calls.server_info(endpoint))
    if features.pp_size > 1:
        raise WeightSyncError(
            f"{endpoint.name} is split into {features.pp_size} pipeline stages, which only take weights from disk; "
            "use --update-weight-transport disk, or tensor parallelism alone"
        )
    return _Facts(stated_dtype(features.dtype), features.tp_size)


def _is_of_this_host(endpoint: EngineEndpoint) -> bool:
    """Whether an engine listens on an address of this host: only those can be bound here."""
    host = urlsplit(endpoint.url).hostname or ""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
