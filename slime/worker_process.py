"""A child Python process that runs named functions for its parent, and can be killed without harm.

Used where work may hang, crash or hog the interpreter lock: graders, tokenising workers. The child
is a fresh interpreter (nothing of the parent's ``__main__`` is imported) joined by one socket; it
exits by itself when the parent dies. It leaves out scheduling: the pool serves calls as they come.
Tests hold: a call that outlives its time-out kills the child; a dead child is reported, not waited
for; one that died while it was idle costs no call; an orphan exits.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import queue
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any

from slime.errors import SlimeError, WaitTimeoutError

_START_TIMEOUT_SECONDS = 120.0
_KILL_TIMEOUT_SECONDS = 10.0
_ORPHAN_GRACE_SECONDS = 30.0
_BEGUN = b"begun"


class WorkerDiedError(SlimeError, RuntimeError):
    """The child process ended in the middle of a call."""


class _NotBegunError(WorkerDiedError):
    """The child process ended before it took up the call, so that another one can."""


class WorkerCallError(SlimeError, RuntimeError):
    """The function raised an unexpected exception; the message carries the child's traceback."""


class WorkerProcess:
    """One child process. Not thread-safe: one call at a time.

    Args:
        name: What it is for, in error messages.
        memory_limit_bytes: Address space of the child; None leaves it as it is.
    """

    def __init__(self, name: str, *, memory_limit_bytes: int | None = None) -> None:
        self._name = name
        self._loaded: set[str] = set()
        parent_end, child_end = multiprocessing.Pipe(duplex=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "slime.worker_process", str(child_end.fileno()), str(memory_limit_bytes or 0)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(child_end.fileno(),), env=environment
        )
        child_end.close()
        self._connection = parent_end

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the child runs."""
        return self._process.poll() is None

    @property
    def has_served(self) -> bool:
        """Whether the child has answered before."""
        return bool(self._loaded)

    def load(self, path: str, factory_args: tuple[Any, ...] | None = None) -> None:
        """Import ``module:attribute`` in the child, once; not counted in the time of any call.

        Args:
            path: The function, or with ``factory_args`` a factory called with them that returns it.
            factory_args: Picklable arguments of the factory.

        Raises:
            WaitTimeoutError: The child did not get ready in time; it is killed.
            WorkerDiedError: The child ended.
        """
        if path not in self._loaded:
            self._request(("load", path, factory_args, None), _START_TIMEOUT_SECONDS, f"the import of {path}")
            self._loaded.add(path)

    def call(self, path: str, arguments: tuple[Any, ...], *, timeout_seconds: float) -> Any:
        """Run a loaded function and return its result.

        Raises:
            WaitTimeoutError: No answer in time; the child is killed.
            WorkerDiedError: The child ended before it answered.
            WorkerCallError: The function raised something other than a SlimeError, which is
                raised here as it is.
        """
        self.load(path)
        return self._request(("call", path, arguments, timeout_seconds), timeout_seconds, path)

    def kill(self) -> None:
        """Kill the child; a call in progress in another thread then fails with WorkerDiedError."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Kill the child and reap it; idempotent."""
        self._connection.close()
        self.kill()
        self._process.wait(_KILL_TIMEOUT_SECONDS)

    def _request(self, message: tuple[Any, ...], timeout_seconds: float, what: str) -> Any:
        begun = answered = False
        try:
            self._connection.send(message)
            begun = self._connection.poll(_START_TIMEOUT_SECONDS) and self._connection.recv_bytes() == _BEGUN
            answered = begun and self._connection.poll(timeout_seconds)
            succeeded, value = self._connection.recv() if answered else (False, None)
        except (EOFError, OSError) as error:
            self.close()
            kind = WorkerDiedError if begun else _NotBegunError
            raise kind(
                f"worker process {self._name} (pid {self.pid}) ended with code {self._process.returncode} "
                f"while it ran {what}"
            ) from error
        if not answered:
            self.close()
            raise WaitTimeoutError(
                f"worker process {self._name} (pid {self.pid}) was killed: no answer from {what} "
                f"within {timeout_seconds if begun else _START_TIMEOUT_SECONDS:g} s"
            )
        if succeeded:
            return value
        if isinstance(value, SlimeError):
            raise value
        raise WorkerCallError(f"{what} failed in worker process {self._name}:\n{value}")


class WorkerPool:
    """Up to ``num_workers`` child processes, started when first needed and kept warm.

    Each call occupies one thread here, which waits, and one child, which works. A child that was
    killed or died, also while it was idle, is replaced before the next call.

    Args:
        name: What it is for, in error messages.
        num_workers: Most children at a time.
        memory_limit_bytes: Address space of each child; None leaves it as it is.
    """

    def __init__(self, name: str, num_workers: int, *, memory_limit_bytes: int | None = None) -> None:
        self._name = name
        self._memory_limit_bytes = memory_limit_bytes
        self._threads = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix=f"{name}-worker")
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()  # last in, first out keeps few children hot
        self._lock = threading.Lock()
        self._all: set[WorkerProcess] = set()
        self._calls: set[Future[Any]] = set()
        self._closed = False

    def submit(
        self,
        path: str,
        arguments: tuple[Any, ...],
        *,
        timeout_seconds: float,
        factory_args: tuple[Any, ...] | None = None,
    ) -> Future[Any]:
        """Run ``module:attribute`` in a child; the time-out counts from when a child starts on it.

        Args:
            path: The function, or with ``factory_args`` a factory called once per child.
            arguments: Picklable arguments.
            timeout_seconds: Most seconds of work.
            factory_args: See ``WorkerProcess.load``.

        Returns:
            A future with the result, or the errors of ``WorkerProcess.call``.
        """
        future = self._threads.submit(self._run, path, arguments, timeout_seconds, factory_args)
        with self._lock:
            self._calls.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(future)

    def _run(
        self, path: str, arguments: tuple[Any, ...], timeout_seconds: float, factory_args: tuple[Any, ...] | None
    ) -> Any:
        while True:
            worker = self._take()
            is_fresh = not worker.has_served
            try:
                worker.load(path, factory_args)
                return worker.call(path, arguments, timeout_seconds=timeout_seconds)
            except _NotBegunError:  # it died while it was idle, unless it never was
                if self._closed or is_fresh:
                    raise
            finally:
                self._give_back(worker)

    def _take(self) -> WorkerProcess:
        while not self._idle.empty():
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:  # another thread was faster
                break
            if worker.alive:
                return worker
            self._drop(worker)
        worker = WorkerProcess(self._name, memory_limit_bytes=self._memory_limit_bytes)
        with self._lock:
            closed = self._closed
            self._all.add(worker)
        if closed:
            self._drop(worker)
            raise WorkerDiedError(f"the worker pool {self._name} was closed")
        return worker

    def _give_back(self, worker: WorkerProcess) -> None:
        if self._closed or not worker.alive:
            self._drop(worker)
        else:
            self._idle.put(worker)

    def _drop(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.close()

    @property
    def pids(self) -> set[int]:
        """Process ids of the children that exist now."""
        with self._lock:
            return {worker.pid for worker in self._all}

    def close(self) -> None:
        """Kill the children, drop queued calls; idempotent. Calls in progress fail at once.

        Raises:
            WaitTimeoutError: A thread did not return although its child was killed.
        """
        with self._lock:
            self._closed = True
            workers, calls = list(self._all), list(self._calls)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        hanging = wait([call for call in calls if not call.done()], _KILL_TIMEOUT_SECONDS).not_done
        for worker in workers:
            worker.close()
        if hanging:
            raise WaitTimeoutError(
                f"the owner of worker pool {self._name} waited {_KILL_TIMEOUT_SECONDS:g} s for {len(hanging)} calls to "
                f"return after their processes {sorted(worker.pid for worker in workers)} were killed"
            )


def resolve(path: str) -> Any:
    """The object at ``module:attribute``."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _read_requests(connection: Connection[Any, Any], requests: queue.SimpleQueue[bytes]) -> None:
    """Feed requests to the main thread; the end of the stream is the end of the parent."""
    while True:
        try:
            requests.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _answer(request: bytes, targets: dict[str, Callable[..., Any]]) -> Any:
    kind, path, arguments, limit = pickle.loads(request)
    if kind == "load":
        targets[path] = resolve(path) if arguments is None else resolve(path)(*arguments)
        return None
    # A C call that holds the interpreter lock stops the reader thread as well; this watchdog does
    # not need the lock, so that even such a call cannot outlive a dead parent for long.
    faulthandler.dump_traceback_later(limit + _ORPHAN_GRACE_SECONDS, exit=True)
    try:
        return targets[path](*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def main(argv: list[str]) -> None:
    """Serve requests from the socket whose descriptor is ``argv[0]`` until the parent is gone."""
    memory_limit = int(argv[1])
    if memory_limit:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    connection: Connection[Any, Any] = Connection(int(argv[0]))
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    targets: dict[str, Callable[..., Any]] = {}
    while True:
        request = requests.get()
        try:
            connection.send_bytes(_BEGUN)
        except OSError:
            return
        try:
            reply = pickle.dumps((True, _answer(request, targets)))
        except SlimeError as error:
            reply = pickle.dumps((False, error))
        except Exception:  # noqa: BLE001 - process boundary: every fault of the function becomes an answer
            reply = pickle.dumps((False, traceback.format_exc()))
        try:
            connection.send_bytes(reply)
        except OSError:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
