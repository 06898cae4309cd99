"""The health monitor against real servers that answer late, badly or not at all."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime import http_control
from slime.cluster.health import HealthMonitor, health_problem


class Server:
    """Answers each question with what is left in ``answers``, then with 200; an answer is a status or seconds."""

    def __init__(self) -> None:
        self.answers: list[int | float] = []
        self.asked: list[float] = []
        self.url = ""


@pytest.fixture
def server():
    known = Server()
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.asked.append(time.monotonic())
            answer = known.answers.pop(0) if known.answers else 200
            if isinstance(answer, float):
                over.wait(answer)
                answer = 200
            self.send_response(answer)
            self.end_headers()

        def log_message(self, *what: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    known.url = f"http://127.0.0.1:{running.server_port}/health_generate"
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield known
    over.set()
    running.shutdown()
    running.server_close()


@contextmanager
def monitor(targets, *, interval=0.05, timeout=0.1, first_wait=0.0):
    failed: list[tuple[str, str, str]] = []
    running = HealthMonitor(
        lambda: targets,
        lambda *what: failed.append(what),
        interval_seconds=interval,
        timeout_seconds=timeout,
        first_wait_seconds=first_wait,
    )
    running.start()
    try:
        yield running, failed
    finally:
        running.close()


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([200], None),
        ([503], None),
        ([0.3], None),
        ([503, 503], "answered 503"),
        ([0.3, 0.3], "waited 0 s"),
        ([0.3, 500], "answered 500"),
    ],
)
def test_one_bad_answer_is_no_failure(server, answers, problem):
    server.answers = answers
    found = health_problem(server.url, 0.1, 2)
    assert found is None if problem is None else problem in found


def test_a_server_that_is_gone(server):
    assert "cannot be reached" in health_problem("http://127.0.0.1:9/health", 0.5, 2)


def test_a_server_is_asked_at_every_interval_and_a_failure_is_told(server):
    with monitor({"engine 0": server.url}, timeout=1.0) as (checks, failed):
        checks.resume()
        wait_until(lambda: len(server.asked) >= 3)
        assert not failed
        server.answers = [503, 503]
        wait_until(lambda: failed)
    assert failed[0][:2] == ("engine 0", server.url)
    assert "503" in failed[0][2]


def test_nothing_is_asked_before_resume_and_after_pause(server):
    with monitor({"engine 0": server.url}) as (checks, _):
        time.sleep(0.15)
        assert not server.asked
        checks.resume()
        wait_until(lambda: server.asked)
        checks.pause()
        time.sleep(0.05)
        before = len(server.asked)
        time.sleep(0.2)
        assert len(server.asked) == before


def test_after_each_resume_the_first_wait_and_an_interval_pass(server):
    with monitor({"engine 0": server.url}, interval=0.15, first_wait=0.1) as (checks, _):
        for _ in range(2):
            server.asked.clear()
            resumed = time.monotonic()
            checks.resume()
            checks.resume()  # it asks already: no second wait
            wait_until(lambda: server.asked)
            assert server.asked[0] - resumed >= 0.25
            checks.pause()


def test_what_was_under_way_when_the_checks_were_paused_is_dropped(server):
    with monitor({"engine 0": server.url}, interval=0.5) as (checks, failed):
        server.answers = [0.2, 0.2]
        checks.resume()
        wait_until(lambda: server.asked)
        checks.pause()
        checks.resume()
        wait_until(lambda: len(server.asked) >= 3)  # the round of after the pause
        assert not failed


def test_pause_waits_until_no_question_is_under_way(server):
    """An engine that still answers one is not idle; a second question is not asked either."""
    with monitor({"engine 0": server.url}, timeout=1.0) as (checks, failed):
        server.answers = [0.4]
        checks.resume()
        wait_until(lambda: server.asked)
        checks.pause()
        assert time.monotonic() - server.asked[0] >= 0.4
    with monitor({"engine 0": server.url}, timeout=0.2) as (checks, failed):
        server.asked.clear()
        server.answers = [5.0, 5.0]
        checks.resume()
        wait_until(lambda: server.asked)
        checks.pause()
        assert time.monotonic() - server.asked[0] < 1.0
        time.sleep(0.1)
        assert len(server.asked) == 1
        assert not failed


def test_no_fault_ends_the_checks(server, monkeypatch, caplog):
    real, asked = http_control.request, []

    def request(url, **options):
        asked.append(url)
        if len(asked) <= 2:
            raise KeyError("status")
        return real(url, **options)

    monkeypatch.setattr(http_control, "request", request)
    told = []

    def tell(*what):
        told.append(what)
        raise ValueError("the owner's fault")

    checks = HealthMonitor(
        lambda: {"engine 0": server.url}, tell, interval_seconds=0.05, timeout_seconds=1.0, first_wait_seconds=0.0
    )
    checks.start()
    checks.resume()
    wait_until(lambda: len(server.asked) >= 2)
    checks.close()
    assert told == [("engine 0", server.url, "its health check failed: KeyError: 'status'")]
    assert "the owner's fault" in caplog.text


def test_a_round_can_be_asked_for_at_once(server):
    with monitor({"engine 0": server.url}) as (checks, failed):
        server.answers = [500, 500]
        checks.ask_now({"engine 0": server.url})
        assert [name for name, _, _ in failed] == ["engine 0"]


def wait_until(condition) -> None:
    give_up_at = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
