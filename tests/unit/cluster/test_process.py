import os
import signal
import subprocess
import sys
import time

import pytest

from slime.cluster.guardian import MARK_VARIABLE, end_marked, marked_processes, new_mark
from slime.cluster.ports import free_port
from slime.cluster.process import ServerProcess
from slime.errors import EngineError, WaitTimeoutError


def serve(tmp_path, code, name="engine 0"):
    return ServerProcess(name, [sys.executable, "-S", "-c", code], log_path=tmp_path / "engine.log", env={})


def test_a_server_that_dies_at_start_is_an_error_with_its_log(tmp_path):
    server = serve(tmp_path, "import sys; sys.exit('no such model')")
    with pytest.raises(EngineError, match=r"(?s)engine 0 died \(exit code 1\).*no such model"):
        server.wait_ready("http://127.0.0.1:9/health", timeout_seconds=10)
    server.stop()


def test_a_server_that_never_answers_is_a_bounded_wait_with_its_log(tmp_path):
    server = serve(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    with pytest.raises(WaitTimeoutError, match=r"(?s)engine 0 to answer.*loading"):
        server.wait_ready(f"http://127.0.0.1:{free_port(31000)}/health", timeout_seconds=0.5)
    server.stop()
    server.stop()
    assert server.exit_code() == -signal.SIGTERM


def test_a_killed_server_is_named_with_the_signal(tmp_path):
    server = serve(tmp_path, "import time; time.sleep(60)")
    server.check()
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while server.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(EngineError, match="SIGKILL"):
        server.check()


def test_sweep_ends_marked_processes_and_their_stubborn_children_only():
    mark, other = new_mark(), new_mark()
    stubborn = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    marked = subprocess.Popen(
        [sys.executable, "-S", "-c", stubborn], env={**os.environ, MARK_VARIABLE: mark}, stdout=subprocess.PIPE
    )
    bystander = subprocess.Popen([sys.executable, "-S", "-c", stubborn], env={**os.environ, MARK_VARIABLE: other})
    try:
        marked.stdout.readline()
        assert marked_processes(mark) == [marked.pid]
        assert end_marked(mark, term_seconds=0.2, kill_seconds=5) == []
        assert marked.wait(5) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        for process in (marked, bystander):
            process.kill()
            process.wait(5)
        marked.stdout.close()


def test_free_port_skips_a_taken_one():
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) != port
