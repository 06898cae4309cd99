"""The engine: one worker thread that owns the model, and the calls other threads make to it.

Everything that touches the model runs on the worker thread, between two steps: submissions, pauses, cache flushes and
weight updates are functions put into its inbox. If the thread fails, every pending and later request gets the reason.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from slime.engines.api import MEMORY_TAGS, PauseMode, RequestError, UpdateFromDiskMessage
from slime.engines.embedded.model import Decoder
from slime.engines.embedded.request import Request
from slime.engines.embedded.scheduler import Scheduler

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_IDLE_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Counts for load balancing."""

    running: int
    waiting: int
    tokens: int


class Engine:
    """A model that generates for whoever submits.

    Args:
        model: With its weights loaded.
        scheduler: Over the same model.
        weight_version: Name of the weights at start.
        num_threads: Compute threads of the worker; None leaves torch's default.
    """

    def __init__(
        self, model: Decoder, scheduler: Scheduler, *, weight_version: str, num_threads: int | None = None
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        scheduler.weight_version = weight_version
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Between its last look into the inbox and its end the worker would miss a message.
        self._inbox_open = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)
        self._stopping = False
        self.paused: PauseMode | None = None
        self._paused_at = 0.0
        self.released: set[str] = set()
        self.is_updating = False
        self.failure: Exception | None = None

    def start(self) -> None:
        """Start the worker thread."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Stop after the current step; pending requests fail."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_seconds)

    @property
    def is_healthy(self) -> bool:
        """Whether the worker runs."""
        return self._thread.is_alive() and self.failure is None

    @property
    def weight_version(self) -> str:
        """Name of the present weights."""
        return self.scheduler.weight_version

    @property
    def load(self) -> Load:
        """Counts at this moment."""
        scheduler = self.scheduler
        return Load(scheduler.num_running, len(scheduler.waiting), scheduler.budget.used)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run ``function`` on the worker thread between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has given up before it began
            try:
                future.set_result(function())
            except RequestError as error:
                # Its frames hold tensors, in shared memory of a sender who waits to see them gone.
                future.set_exception(error.with_traceback(None))
            except Exception as error:  # noqa: BLE001 - process boundary: the caller's thread gets whatever happened
                future.set_exception(error)

        if not self._post(run):
            future.set_exception(self._down())
        return future

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; if the worker is down they fail at once."""
        if not self._post(lambda: [self.scheduler.submit(request) for request in requests] and None):
            for request in requests:
                request.progress(self._down())

    def _post(self, message: Callable[[], None]) -> bool:
        """Hand a message to the worker; False when nobody will take it."""
        with self._inbox_open:
            if not self.is_healthy:
                return False
            self._inbox.put(message)
            return True

    # The following run on the worker thread, through ``call``.

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping; end, put back or keep what is running. What comes during a pause waits for its end."""
        if self.paused is None:
            self._paused_at = time.monotonic()
        if mode == "abort":
            self.scheduler.abort(lambda r: r.created <= self._paused_at, "Aborted by pause_generation")
        elif mode == "retract":
            self.scheduler.retract()
        self.paused = mode

    def resume(self) -> None:
        """Step again."""
        self.paused = None

    def abort(self, rid: str, abort_all: bool) -> None:
        """End one request, all samples of one, or all; unknown ids are no error."""
        self.scheduler.abort(lambda r: abort_all or rid in (r.rid, r.parent_rid), "Aborted by abort_request")

    def flush(self) -> bool:
        """Forget kept prompts; False while requests run, or wait for a step that will come."""
        if self.scheduler.waiting and self.paused is None:
            return False
        return self.scheduler.flush()

    def release(self, tags: Sequence[str]) -> None:
        """Free weights or key-value memory.

        Raises:
            RequestError: Requests are running.
        """
        if self.scheduler.num_running or (self.scheduler.waiting and self.paused is None):
            raise RequestError("memory cannot be released while requests run; pause with mode abort or retract first")
        if "kv_cache" in tags:
            self.scheduler.flush()
        if "weights" in tags:
            self.scheduler.flush()
            self.model.weights.release()
        self.released |= set(tags)
        _return_free_memory()

    def reoccupy(self, tags: Sequence[str]) -> None:
        """Allow released memory to be used again; weights hold no values until an update fills them.

        Raises:
            RequestError: A tag was not released.
        """
        wrong = [tag for tag in tags if tag not in self.released]
        if wrong:
            raise RequestError(f"tags {', '.join(wrong)} are not released; released: {sorted(self.released) or 'none'}")
        self.released -= set(tags)

    def begin_update(self) -> None:
        """Open a weight update; no step runs until it is ended.

        Raises:
            RequestError: One is open already.
        """
        if self.is_updating:
            raise RequestError("a weight update has begun already; send end_weight_update first")
        self.is_updating = True

    def end_update(self) -> str:
        """Close a weight update; returns a sentence about what is held now."""
        if not self.is_updating:
            raise RequestError("no weight update has begun; send begin_weight_update first")
        self.is_updating = False
        missing = self.model.weights.missing
        return f"{len(missing)} tensors still hold no values, such as {min(missing)}" if missing else "weights complete"

    def write_weights(
        self, tensors: Sequence[tuple[str, Tensor]], *, version: str | None, flush: bool, abort_all: bool
    ) -> None:
        """Replace some weights inside an open update.

        Raises:
            RequestError: No update is open, a tensor does not fit, or running requests forbid the flush.
        """
        self.require_update()
        self.prepare_update(flush, abort_all)
        self.model.weights.write(tensors)
        if version is not None:
            self.scheduler.weight_version = version

    def require_update(self) -> None:
        """Raise RequestError unless weights can be written now."""
        if not self.is_updating:
            raise RequestError("weights must be sent between begin_weight_update and end_weight_update")
        if "weights" in self.released:
            raise RequestError("the weights' memory is released; send resume_memory_occupation with tag weights first")

    def prepare_update(self, flush: bool, abort_all: bool) -> None:
        """Abort if asked to, and make kept prompts unfindable."""
        if abort_all:
            self.scheduler.abort(lambda _: True, "Aborted by a weight update")
        if flush and self.scheduler.num_running:
            raise RequestError(
                f"{self.scheduler.num_running} requests hold KV cache of the old weights, so it cannot be flushed; "
                "nothing has changed. Pause with mode abort or retract first, or send flush_cache: false"
            )
        self.scheduler.forget_prefixes()

    def load_from_disk(self, message: UpdateFromDiskMessage) -> None:
        """Replace all weights by those of a model directory; needs no begin and end.

        Raises:
            RequestError: Running requests forbid the flush.
            ConfigError: The directory does not fit.
        """
        if "weights" in self.released:
            raise RequestError("the weights' memory is released; send resume_memory_occupation with tag weights first")
        self.prepare_update(message.flush_cache, message.abort_all_requests)
        self.model.weights.load(message.model_path)
        if message.weight_version is not None:
            self.scheduler.weight_version = message.weight_version

    def reset_weights(self) -> None:
        """Set every weight to zero, so that a later update can be shown to fill them all."""
        self.scheduler.forget_prefixes()
        self.model.weights.reset()

    def set_version(self, version: str, abort_all: bool) -> None:
        """Rename the present weights."""
        if abort_all:
            self.scheduler.abort(lambda _: True, "Aborted by update_weight_version")
        self.scheduler.weight_version = version

    # The worker thread.

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            while not self._stopping:
                self._take_messages()
                if self._may_step():
                    self.scheduler.step()
            self.failure = RequestError("the server is stopping", 503)
        except Exception as error:  # thread boundary: a failed step must reach every client and /health
            logger.exception("the model thread failed")
            self.failure = error
        self._fail_pending()

    def _take_messages(self) -> None:
        message = self._next_message(block=not self._may_step())
        while message is not None:
            message()
            message = self._next_message(block=False)

    def _next_message(self, *, block: bool) -> Callable[[], None] | None:
        try:
            return self._inbox.get(timeout=_IDLE_POLL_SECONDS) if block else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _may_step(self) -> bool:
        if self.paused is not None or self.is_updating or not self.scheduler.has_work:
            return False
        if self.released & set(MEMORY_TAGS[:2]) or self.model.weights.missing:
            self.scheduler.fail(RequestError(self._unready()))
            return False
        return True

    def _unready(self) -> str:
        held = self.released & set(MEMORY_TAGS[:2])
        if held:
            return f"cannot generate: memory of {', '.join(sorted(held))} is released; send resume_memory_occupation"
        missing = self.model.weights.missing
        return f"cannot generate: {len(missing)} weights hold no values since their release, such as {min(missing)}"

    def _fail_pending(self) -> None:
        error = self._down()
        with self._inbox_open:
            while True:  # what was submitted before the failure, but not taken yet
                try:
                    message = self._inbox.get_nowait()
                except queue.Empty:
                    break
                if message is not None:
                    message()
        self.scheduler.fail(error)

    def _down(self) -> RequestError:
        if isinstance(self.failure, RequestError):
            return self.failure
        return RequestError(f"the engine's model thread failed and the server must be restarted: {self.failure!r}", 503)


def _return_free_memory() -> None:
    """Give freed heap memory back to the system; a large malloc threshold would keep it otherwise."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
