"""Tensors for engines that can read the trainer's memory: shared memory on a CPU, CUDA IPC handles on a GPU.

A piece of weights is laid out in one buffer by every rank that shares a device with the engine; the ranks hand their
notes to the first of them, which posts one per tensor-parallel process of the engine. While the engine reads one
piece, the next is laid out; a buffer is freed when the engine has answered. Tests hold: at most two buffers exist at
any time; nothing stays behind in shared memory, also when an engine does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from slime.engines import api
from slime.errors import SlimeError, WeightSyncError
from slime.http_control import HttpStatusError
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.flat import LOAD_FORMAT, FlatBucket
from slime.weights.report import Bucket
from slime.weights.team import RankTeam


class TensorChannel:
    """Brings pieces to engines that share the memory of the same training ranks.

    Args:
        endpoints: The engines: all of this machine on a CPU, one on a GPU.
        num_notes: How many processes of each engine read a piece.
        team: The ranks that lay pieces out; the first one posts.
        deadline: Of the update.
    """

    def __init__(
        self,
        endpoints: Sequence[EngineEndpoint],
        num_notes: Sequence[int],
        *,
        team: RankTeam[list[str] | str],
        deadline: Deadline,
    ) -> None:
        self._num_notes = {endpoint.url: count for endpoint, count in zip(endpoints, num_notes, strict=True)}
        self._calls = EngineCalls(endpoints, deadline)
        self._team = team
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors")
        self._posted: Future[None] | None = None
        self._buffer: FlatBucket | None = None
        self._failure: SlimeError | None = None
        self._stopped = False
        self.held_bytes = 0
        self.peak_bytes = 0

    def begin(self) -> None:
        """Start an update."""
        self._failure, self._stopped = None, False
        self.peak_bytes = 0

    def start(self, piece: Bucket, version: str) -> None:
        """Lay a piece out and have the engines read it; returns while they do.

        A failure is kept for ``finish``: until then the other ranks count on this one.
        """
        if self._stopped:
            return
        buffer = FlatBucket(piece)
        self.held_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._wait_for_answers()
        notes = self._exchange_notes(buffer)
        self._free()
        if self._stopped:
            return
        self._buffer = buffer
        if self._team.leads:
            names = f"{piece[0][0]} to {piece[-1][0]}"
            self._posted = self._pool.submit(self._post, notes, version, names)

    def finish(self) -> None:
        """Wait until the engines have everything.

        Raises:
            WeightSyncError: One refused a piece.
            EngineError: One cannot be reached.
            WaitTimeoutError: One, or another rank, did not answer in time.
        """
        if not self._stopped:
            self._wait_for_answers()
            self._exchange_notes(None)
        self._free()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread that posts, and the group of the ranks."""
        self._pool.shutdown()
        self._free()
        self._team.close()

    def _exchange_notes(self, buffer: FlatBucket | None) -> list[list[str]]:
        """Tell each other where the buffers are, or that this rank has failed: then all of them stop here.

        Since the first rank comes only after the engines' answers, everybody may free the piece before.
        """
        if self._failure is not None:
            mine: list[str] | str = str(self._failure)
        elif buffer is None:
            mine = []
        else:
            mine = buffer.payloads(sum(self._num_notes.values()) if len(self._team.ranks) == 1 else 1)
        notes = self._team.exchange(mine, "share the next tensors")
        told = [note for note in notes if isinstance(note, str)]
        if told:
            self._stopped = True
            self._failure = self._failure or WeightSyncError(f"another rank could not send: {told[0]}")
            if buffer is not None:
                self.held_bytes -= buffer.nbytes
                buffer.free(unread=True)
            return []
        return [note for note in notes if isinstance(note, list)]

    def _post(self, notes: list[list[str]], version: str, names: str) -> None:
        """Send every engine its notes: of one rank, those meant for it; of several, one of each."""
        flat = [note for row in notes for note in row]
        share: dict[str, list[str]] = {}
        for endpoint in self._calls.endpoints:
            count = self._num_notes[endpoint.url]
            share[endpoint.url], flat = flat[:count], flat[count:]

        def post(endpoint: EngineEndpoint) -> None:
            body = {
                "serialized_named_tensors": share[endpoint.url],
                "load_format": LOAD_FORMAT,
                "flush_cache": False,  # done before the update, and nothing was computed since
                "weight_version": version,
            }
            try:
                self._calls.call(endpoint, api.UPDATE_WEIGHTS_FROM_TENSOR, body)
            except HttpStatusError as error:
                raise WeightSyncError(f"version {version}, tensors {names}: {error}") from None

        self._calls.each(post)

    def _wait_for_answers(self) -> None:
        posted, self._posted = self._posted, None
        if posted is not None:
            try:
                posted.result()  # bounded: every request is
            except SlimeError as error:
                self._failure = error

    def _free(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self.held_bytes -= buffer.nbytes
            buffer.free(unread=self._failure is not None and not isinstance(self._failure, WeightSyncError))
