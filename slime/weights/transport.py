"""Carry new weights from the trainer into engines of the same machine, and prove that they arrived.

One bucket at a time is laid out in one flat piece of shared memory; the engines read it in place and answer, then it is
freed. Works with the embedded engine and with SGLang's ``/update_weights_from_tensor``. Afterwards the checksums that
each engine computes over what it holds are compared with those of the sent tensors.

Synchronous: it runs where the trainer's first rank is. Tests hold: an engine that keeps an old value is reported by
tensor and version, and nothing stays behind in shared memory.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, cast

import torch
import torch.multiprocessing
from torch import Tensor

from slime.config import Config
from slime.engines import api
from slime.errors import EngineError, WaitTimeoutError, WeightSyncError
from slime.http_control import HttpStatusError, in_parallel, request
from slime.weights.checksum import tensor_checksum
from slime.weights.endpoint import EngineEndpoint
from slime.weights.pause import pause_mode_for
from slime.weights.precision import held_dtype
from slime.weights.report import Bucket, SyncReport

logger = logging.getLogger(__name__)

multiprocessing = cast(Any, torch.multiprocessing)
_ALIGNMENT_BYTES = 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NOT_FOUND = 404


class TensorUpdater:
    """One rank's part in sending tensors to engines of this machine; see ``WeightUpdater``.

    Args:
        config: The resolved configuration.
        rank: This process; rank 0 sends.
    """

    receivers: Literal["first", "all"] = "first"

    def __init__(self, config: Config, *, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._transport: TensorTransport | None = None

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Take these engines from now on."""
        self._transport = None
        if endpoints and self._rank == 0:
            self._transport = TensorTransport(
                [endpoint.url for endpoint in endpoints],
                timeout_seconds=self._config.weights.weight_sync_timeout_seconds,
                bucket_bytes=self._config.weights.update_weight_buffer_size,
                pause_mode=pause_mode_for(self._config, endpoints),
            )

    def update(self, buckets: Iterable[Bucket], version: str) -> SyncReport:
        """Bring every engine to new weights."""
        if self._transport is not None:
            return self._transport.update(buckets, version)
        for _ in buckets:  # this rank only contributes its shards
            pass
        return SyncReport(seconds=0.0, bytes=0, tensors=0, verified=0)

    def close(self) -> None:
        """Free what is held."""


class TensorTransport:
    """Sends weights to engines of this machine.

    Args:
        engine_urls: One base URL per engine.
        timeout_seconds: For each HTTP call.
        bucket_bytes: Bound of one piece of shared memory; larger buckets are sent in several pieces.
        pause_mode: What happens to requests that run: ``retract`` computes them on with the new weights, ``abort``
            ends them, ``in_place`` keeps their cached keys and values of the old weights.
        verify: Whether to compare checksums.
    """

    def __init__(
        self,
        engine_urls: Sequence[str],
        *,
        timeout_seconds: float,
        bucket_bytes: int,
        pause_mode: api.PauseMode = "retract",
        verify: bool = True,
    ) -> None:
        if not engine_urls:
            raise EngineError("there is no engine to send weights to")
        self._urls = [url.rstrip("/") for url in engine_urls]
        self._timeout = timeout_seconds
        self._bucket_bytes = bucket_bytes
        self._pause_mode: api.PauseMode = pause_mode
        self._verify = verify
        self._held_version = api.INITIAL_WEIGHT_VERSION

    def update(self, buckets: Iterable[Bucket], version: str) -> SyncReport:
        """Bring every engine to new weights.

        Args:
            buckets: (Hugging Face name, CPU tensor) pairs in any order; consumed once.
            version: Name of the new weights; comes back with every answer.

        Raises:
            WeightSyncError: An engine refused a tensor, or holds other values than were sent.
            EngineError: An engine cannot be reached.
            WaitTimeoutError: An engine did not answer in time.
        """
        started = time.monotonic()
        dtype = self._engine_dtype()
        self._to_all(api.PAUSE_GENERATION, {"mode": self._pause_mode})
        sent: dict[str, str] = {}
        total = 0
        has_brackets = False
        try:
            if self._pause_mode != "in_place":
                self._to_all(api.FLUSH_CACHE, {}, query=f"?timeout={self._timeout / 2:.0f}")
            has_brackets = self._begin()
            for bucket in buckets:
                for piece in self._pieces(_cast(bucket, dtype)):
                    total += self._send(piece, version, sent)
            if has_brackets:
                self._to_all(api.END_WEIGHT_UPDATE, {})
            verified = self._compare(sent, version) if self._verify else 0
        except BaseException:
            self._recover(has_brackets)
            raise
        self._to_all(api.CONTINUE_GENERATION, {})
        self._held_version = version
        return SyncReport(seconds=time.monotonic() - started, bytes=total, tensors=len(sent), verified=verified)

    def _recover(self, has_brackets: bool) -> None:
        """After a failure: an engine left paused would hang every client, and one left open refuses the next try."""
        for path in (*((api.END_WEIGHT_UPDATE,) if has_brackets else ()), api.CONTINUE_GENERATION):
            with contextlib.suppress(EngineError, WaitTimeoutError):
                self._to_all(path, {})

    def _begin(self) -> bool:
        """Open the update; False for engines that do not know the bracket (older SGLang)."""
        try:
            self._to_all(api.BEGIN_WEIGHT_UPDATE, {})
        except HttpStatusError as error:
            if error.status == _NOT_FOUND:
                return False
            raise
        return True

    def _pieces(self, bucket: Bucket) -> Iterator[Bucket]:
        """Cut a bucket so that no piece exceeds the bound, unless one tensor alone does."""
        piece: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in bucket:
            if piece and size + tensor.nbytes > self._bucket_bytes:
                yield piece
                piece, size = [], 0
            piece.append((name, tensor))
            size += tensor.nbytes
        if piece:
            yield piece

    def _send(self, piece: Bucket, version: str, sent: dict[str, str]) -> int:
        """Share one piece until every engine has copied it; notes checksums in ``sent`` and returns the bytes."""
        with _shared(piece) as (payload, views):
            sent.update((name, tensor_checksum(view) if self._verify else "") for name, view in views)
            body = {
                "serialized_named_tensors": [payload],
                "flush_cache": self._pause_mode != "in_place",
                "weight_version": version,
            }
            try:
                self._to_all(api.UPDATE_WEIGHTS_FROM_TENSOR, body)
            except HttpStatusError as error:
                names = f"{piece[0][0]} to {piece[-1][0]}"
                raise WeightSyncError(f"version {version}, tensors {names}: {error}") from error
        return sum(tensor.nbytes for _, tensor in piece)

    def _compare(self, sent: Mapping[str, str], version: str) -> int:
        """Compare what was sent with what each engine holds; returns the number of comparisons.

        SGLang names the fused tensors it holds, so only the others can be compared there.
        """
        problems: list[str] = []
        compared = 0
        for url, reply in self._to_all(api.WEIGHTS_CHECKER, {"action": "checksum"}):
            if not isinstance(reply, dict):
                raise WeightSyncError(f"{url} answered the checksum request with {reply!r:.200}")
            held = cast("dict[str, str]", cast("dict[str, Any]", reply)["ranks"][0]["checksums"])
            is_ours = "model.embed_tokens.weight" in held and len(next(iter(held.values()))) == _CHECKSUM_DIGITS
            names = [name for name in sent if name in held] if is_ours else []
            if len(names) < len(sent):
                logger.warning("%s: %d of %d tensors can be verified", url, len(names), len(sent))
            compared += len(names)
            different = [name for name in names if held[name] != sent[name]]
            if different:
                problems.append(
                    f"{url} holds other values than version {version} for {len(different)} of {len(names)} tensors "
                    f"(it had version {self._held_version}), such as {different[0]}: "
                    f"sent {sent[different[0]]}, held {held[different[0]]}"
                )
        if problems:
            raise WeightSyncError("\n".join(problems))
        return compared

    def _engine_dtype(self) -> torch.dtype | None:
        """Dtype that every engine states to hold its weights in; None, which converts nothing, if they do not agree."""
        found: set[torch.dtype | None] = set()
        for _, info in self._to_all(api.SERVER_INFO, None):
            name = cast("dict[str, Any]", info).get("dtype") if isinstance(info, dict) else None
            found.add(_DTYPES.get(str(name)))
        return found.pop() if len(found) == 1 else None

    def _to_all(self, path: str, body: Mapping[str, Any] | None, query: str = "") -> list[tuple[str, Any]]:
        """One request to every engine at the same time; (url, answer) pairs."""

        def call(url: str) -> Any:
            return request(url + path + query, body, timeout_seconds=self._timeout, waiter="the trainer")

        return list(zip(self._urls, in_parallel(call, self._urls), strict=True))


_CHECKSUM_DIGITS = 32


def _cast(bucket: Bucket, dtype: torch.dtype | None) -> Bucket:
    """Convert to the dtype the engines hold: half the bytes for bfloat16, and checksums that can be compared."""
    if dtype is None:
        return bucket
    return [(name, tensor.to(held_dtype(name, dtype))) for name, tensor in bucket]


@contextlib.contextmanager
def _shared(piece: Bucket) -> Generator[tuple[str, Bucket]]:
    """Copy tensors into one piece of shared memory; yields payload and shared views, frees the memory afterwards."""
    offsets: list[int] = []
    end = 0
    for _, tensor in piece:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    strategy = multiprocessing.get_sharing_strategy()
    views: list[tuple[str, Tensor]] = []
    # By file name: the default passes file descriptors, which works only between relatives of one process.
    multiprocessing.set_sharing_strategy("file_system")
    try:
        flat = cast(Any, torch.empty(max(end, 1), dtype=torch.uint8)).share_memory_()
        for (name, tensor), offset in zip(piece, offsets, strict=True):
            views.append((name, flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)))
            views[-1][1].copy_(tensor.detach())
        del flat
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(views)
        yield base64.b64encode(buffer.getvalue()).decode(), views
    finally:
        views.clear()  # free it now, also when an exception keeps the frames that know this list
        multiprocessing.set_sharing_strategy(strategy)
