"""Tensors for engines elsewhere: one process group from the trainer's first rank to every process of every engine.

One source, not one per pipeline stage: each NCCL group costs every engine GPU its buffers, stages would have to take
turns on an engine anyway, and bringing a stage's tensors to the first rank overlaps with the broadcast of those
before. A piece goes as one flat broadcast, in SGLang's ``flattened_bucket`` order. Tests hold: a group is made anew
when the engines change, and none is left; an engine that does not answer is named in time, one that refuses to join or
dies meanwhile at once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.engines import api
from slime.errors import EngineError, SlimeError, WeightSyncError
from slime.http_control import HttpStatusError
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.flat import LOAD_FORMAT
from slime.weights.groups import Rendezvous, join_group, leave_group
from slime.weights.report import Bucket

GROUP_NAME = "slime"
_LEAVE_SECONDS = 2.0
_CAUSE_SECONDS = 1.0
"""After a failure: until the engine at fault shows it, and until all others have come to where they meet."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

dist = cast(Any, torch.distributed)


class BroadcastChannel:
    """Brings pieces to engines over a process group. Lives on the trainer's first rank alone.

    Args:
        endpoints: The engines.
        num_ranks: How many processes of each engine join.
        deadline: Of the update.
        backend: ``nccl`` or ``gloo``.

    Raises:
        WeightSyncError: An engine refused to join.
        EngineError: One cannot be reached.
        WaitTimeoutError: Not all joined in time.
    """

    def __init__(
        self, endpoints: Sequence[EngineEndpoint], num_ranks: Sequence[int], *, deadline: Deadline, backend: str
    ) -> None:
        self._calls = EngineCalls(endpoints, deadline)
        self._pool = ThreadPoolExecutor(max_workers=1 + len(endpoints), thread_name_prefix="broadcast")
        self._sent: Future[None] | None = None
        self._sent_bytes = 0
        self._failure: SlimeError | None = None
        self._rendezvous: Rendezvous | None = None
        self._group: ProcessGroup | None = None
        self.held_bytes = 0
        self.peak_bytes = 0
        try:
            self._group = self._join(num_ranks, backend)
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Start an update."""
        self._failure = None
        if self._group is None:
            self._failure = EngineError(
                "the group of the weights broke in an earlier update; connect the engines again"
            )
        self.peak_bytes = 0

    def start(self, piece: Bucket, version: str) -> None:
        """Lay a piece out and begin to send it; a failure is kept for ``finish``."""
        if self._failure is not None:
            return
        size = sum(tensor.nbytes for _, tensor in piece)
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        flat, layout = laid_out(piece)
        message = layout | {
            "group_name": GROUP_NAME,
            "load_format": LOAD_FORMAT,
            "flush_cache": False,  # done before the update, and nothing was computed since
            "weight_version": version,
        }
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()  # another thread sends it
        self._wait_for_answers()
        if self._failure is None:
            self._sent_bytes = size
            self._sent = self._pool.submit(self._send, flat, message)
        else:
            self.held_bytes -= size

    def finish(self) -> None:
        """Wait until the engines have everything.

        Raises:
            WeightSyncError: One refused a piece.
            EngineError: One cannot be reached.
            WaitTimeoutError: One did not answer in time.
        """
        self._wait_for_answers()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Dissolve the group on both sides; engines that do not answer are left alone."""
        # At the same time: NCCL may want both sides for it.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="leave") as pool:
            left = pool.submit(self._leave_on_engines)
            self._dissolve()
            left.result()
        self._pool.shutdown(wait=False)

    def _join(self, num_ranks: Sequence[int], backend: str) -> ProcessGroup:
        self._leave_on_engines()  # one of an earlier trainer would be in the way
        seconds = self._calls.deadline.seconds_left
        meeting = self._rendezvous = Rendezvous(_address_towards(self._calls.endpoints), timeout_seconds=seconds)
        body: dict[str, Any] = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "world_size": 1 + sum(num_ranks),
            "group_name": GROUP_NAME,
            "backend": backend,
        }
        offsets = {endpoint.url: 1 + sum(num_ranks[:index]) for index, endpoint in enumerate(self._calls.endpoints)}

        def ask(endpoint: EngineEndpoint) -> None:
            message = body | {"rank_offset": offsets[endpoint.url]}
            try:
                self._calls.call(endpoint, api.INIT_WEIGHTS_UPDATE_GROUP, message)
            except HttpStatusError as error:
                raise WeightSyncError(f"{endpoint.name} cannot join the group of the weights: {error}") from None

        def join() -> ProcessGroup:
            if device is not None:
                torch.cuda.set_device(device)
            return join_group(
                master_address=meeting.address,
                master_port=meeting.port,
                rank=0,
                world_size=body["world_size"],
                name=GROUP_NAME,
                backend=backend,
                timeout_seconds=seconds,
                entry=meeting.entry,
            )

        device = torch.cuda.current_device() if backend == "nccl" else None
        asked = [self._pool.submit(ask, endpoint) for endpoint in self._calls.endpoints]
        joined = self._pool.submit(join)
        try:
            return _all_or_first_failure(joined, asked)
        except BaseException:
            # Those that refused nothing would wait for the others: they find the meeting, then lose it.
            wait(asked, timeout=_CAUSE_SECONDS)
            meeting.close()
            joined.add_done_callback(_leave_again)
            raise

    def _leave_on_engines(self) -> None:
        def leave(endpoint: EngineEndpoint) -> None:
            body = {"group_name": GROUP_NAME}
            with contextlib.suppress(SlimeError):
                self._calls.call(endpoint, api.DESTROY_WEIGHTS_UPDATE_GROUP, body, timeout_seconds=_LEAVE_SECONDS)

        self._calls.each(leave)

    def _send(self, flat: Tensor, message: dict[str, Any]) -> None:
        """Announce a piece to every engine, broadcast it, take the answers."""

        def announce(endpoint: EngineEndpoint) -> None:
            try:
                self._calls.call(endpoint, api.UPDATE_WEIGHTS_FROM_DISTRIBUTED, message)
            except HttpStatusError as error:
                names = message["names"]
                raise WeightSyncError(
                    f"version {message['weight_version']}, tensors {names[0]} to {names[-1]}: {error}"
                ) from None

        if flat.is_cuda:
            torch.cuda.set_device(flat.device)
        answers = [self._pool.submit(announce, endpoint) for endpoint in self._calls.endpoints]
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        try:
            for answer in answers:
                answer.result()  # before waiting for the broadcast: an engine that is gone never takes part in it
            work.wait()
        finally:
            del work  # it keeps the connections open, and an error that is raised here would keep it

    def _wait_for_answers(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        try:
            sent.result()
        except SlimeError as error:
            self._failure = error
        except RuntimeError as error:  # of the process group
            self._failure = EngineError(f"the broadcast of weights failed: {error}")
        self.held_bytes -= self._sent_bytes
        if self._failure is not None and not isinstance(self._failure, WeightSyncError):
            self._dissolve()  # the engines that wait in the broadcast learn of it and can be spoken to again

    def _dissolve(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            leave_group(group)
        if self._rendezvous is not None:
            self._rendezvous.close()


def laid_out(piece: Bucket) -> tuple[Tensor, dict[str, Any]]:
    """The bytes of a piece without gaps, which engines do not expect, and the order in which they lie.

    Elements of the largest size come first: every tensor is then aligned.

    Returns:
        ``[bytes]`` uint8, and names, dtypes and shapes.
    """
    ordered = sorted(piece, key=lambda item: -item[1].element_size())
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in ordered])
    return flat, {
        "names": [name for name, _ in ordered],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
        "shapes": [list(tensor.shape) for _, tensor in ordered],
    }


def _address_towards(endpoints: Sequence[EngineEndpoint]) -> str:
    """Address of this host at which the engines reach it."""
    hosts = [urlsplit(endpoint.url).hostname or "" for endpoint in endpoints]
    host = next((host for host in hosts if host not in _LOOPBACK), _LOOPBACK[0])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it asks for the route
        return str(probe.getsockname()[0])


def _all_or_first_failure(joined: Future[ProcessGroup], asked: Sequence[Future[None]]) -> ProcessGroup:
    """The group once everybody is in it; else what an engine said or suffered, as soon as it is known."""
    everybody: list[Future[Any]] = [joined, *asked]
    wait(everybody, return_when=FIRST_EXCEPTION)  # each is bounded by the deadline
    if joined.done() and joined.exception() is not None:
        wait(asked, timeout=_CAUSE_SECONDS, return_when=FIRST_EXCEPTION)
    for future in asked:
        if future.done():
            future.result()
    return joined.result()


def _leave_again(joined: Future[ProcessGroup]) -> None:
    if joined.exception() is None:
        leave_group(joined.result())
