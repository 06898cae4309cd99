"""Child processes end when they should, and only then."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slime import worker_process
from slime.errors import DataError, WaitTimeoutError
from slime.worker_process import WorkerCallError, WorkerDiedError, WorkerPool, WorkerProcess

pytestmark = pytest.mark.timeout(60)


def gone(pid: int, timeout_seconds: float = 10.0) -> bool:
    """Whether a process has ended (a zombie counts) within the time."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_calls_and_state_of_a_factory() -> None:
    worker = WorkerProcess("test")
    assert worker.call("math:hypot", (3, 4), timeout_seconds=10) == 5
    worker.load("operator:attrgetter", ("real",))
    assert worker.call("operator:attrgetter", (3 + 4j,), timeout_seconds=10) == 3
    worker.close()
    worker.close()
    assert not worker.alive


def test_errors_of_the_function() -> None:
    worker = WorkerProcess("test")
    with pytest.raises(WorkerCallError, match=r"math:sqrt failed in worker process test:\n(.|\n)*ValueError"):
        worker.call("math:sqrt", (-1,), timeout_seconds=10)
    with pytest.raises(DataError, match="f:1: not a JSON object"):
        worker.call("slime.data.files:decode_json_row", ("{", "f:1"), timeout_seconds=10)
    with pytest.raises(WorkerCallError, match="cannot pickle"):
        worker.call("threading:Lock", (), timeout_seconds=10)
    with pytest.raises(WorkerCallError, match="ModuleNotFoundError"):
        worker.load("no_such_module:function")
    assert worker.alive
    worker.close()


def test_time_out_kills_the_child() -> None:
    worker = WorkerProcess("test")
    pid = worker.pid
    with pytest.raises(
        WaitTimeoutError, match=rf"worker process test \(pid {pid}\) was killed: no answer from time:sleep"
    ):
        worker.call("time:sleep", (60,), timeout_seconds=0.1)
    assert gone(pid)


def test_dead_child_is_reported() -> None:
    worker = WorkerProcess("test")
    with pytest.raises(WorkerDiedError, match=r"ended with code 7 while it ran os:_exit"):
        worker.call("os:_exit", (7,), timeout_seconds=10)


def test_memory_limit() -> None:
    worker = WorkerProcess("test", memory_limit_bytes=1 << 30)
    with pytest.raises(WorkerCallError, match="MemoryError"):
        worker.call("builtins:bytearray", (2 << 30,), timeout_seconds=10)
    worker.close()


def test_pool_serves_in_parallel_and_closes_at_once() -> None:
    pool = WorkerPool("test", 3)
    pids = {f.result() for f in [pool.submit("os:getpid", (), timeout_seconds=10) for _ in range(9)]}
    assert pids <= pool.pids
    assert 1 <= len(pids) <= 3
    hanging = pool.submit("time:sleep", (60,), timeout_seconds=60)
    queued = [pool.submit("time:sleep", (60,), timeout_seconds=60) for _ in range(5)]
    while not hanging.running():
        time.sleep(0.01)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5
    assert isinstance(hanging.exception(), WorkerDiedError)
    assert all(f.cancelled() or isinstance(f.exception(), WorkerDiedError) for f in queued)
    assert all(gone(pid) for pid in pids)
    assert pool.pids == set()


def test_orphans_exit() -> None:
    """A parent that is killed takes its children along, idle or busy."""
    code = (
        "import time; from slime.worker_process import WorkerPool; p = WorkerPool('test', 2);"
        "pids = {f.result() for f in [p.submit('os:getpid', (), timeout_seconds=9) for _ in range(2)]};"
        "p.submit('time:sleep', (60,), timeout_seconds=60); print(*p.pids, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_a_worker_that_died_while_idle_costs_no_call() -> None:
    pool = WorkerPool("test", 1)
    pid = pool.submit("os:getpid", (), timeout_seconds=10).result()
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    other = pool.submit("os:getpid", (), timeout_seconds=10).result()
    assert other != pid
    assert pool.pids == {other}
    pool.close()


def test_closing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_KILL_TIMEOUT_SECONDS", 0.2)
    pool = WorkerPool("test", 1)
    pool.submit("os:getpid", (), timeout_seconds=10).result()
    begun, go_on = threading.Event(), threading.Event()
    pool._threads.submit(begun.set)
    stuck = pool._threads.submit(go_on.wait, 10)
    pool._calls.add(stuck)
    begun.wait(5)
    while not stuck.running():
        time.sleep(0.01)
    with pytest.raises(WaitTimeoutError, match=r"worker pool test waited 0.2 s for 1 calls to return"):
        pool.close()
    go_on.set()
