"""Control requests against peers that answer badly, slowly, or not to the end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from slime.cluster.process import responds
from slime.errors import EngineError, WaitTimeoutError
from slime.http_control import HttpStatusError, request

Script = Callable[[socket.socket, threading.Event], None]


@contextmanager
def peer(script: Script) -> Iterator[str]:
    """An address where each connection is answered by ``script``, whatever is asked."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    script(connection, over)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/health"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def saying(content: bytes) -> Script:
    return lambda connection, over: connection.sendall(content)


GARBAGE = saying(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
BROKEN_OFF = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


@pytest.mark.parametrize(("script", "kind"), [(GARBAGE, "BadStatusLine"), (BROKEN_OFF, "IncompleteRead")])
def test_an_answer_that_is_no_whole_http_is_an_engine_error(script: Script, kind: str) -> None:
    with peer(script) as url:
        with pytest.raises(EngineError, match=rf"{url} gave no whole HTTP answer: {kind}"):
            request(url, timeout_seconds=5)
        assert not responds(url)


def test_the_status_of_an_error_counts_although_its_text_breaks_off() -> None:
    with (
        peer(saying(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nbu")) as url,
        pytest.raises(HttpStatusError, match=r"answered 503: \(its text broke off: IncompleteRead\)") as raised,
    ):
        request(url, timeout_seconds=5)
    assert raised.value.status == 503


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"])
def test_the_limit_holds_for_the_whole_reply(head: bytes) -> None:
    """A byte now and then: in the headers, then in the body."""

    def trickle(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(head)
        while not over.wait(0.05):
            connection.sendall(b"x")

    with peer(trickle) as url:
        started = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=f"the driver waited 0 s for {url} to answer"):
            request(url, timeout_seconds=0.3)
        assert time.monotonic() - started < 2


def test_whole_answers_are_read() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 200008\r\n\r\n" + b'{"a": "' + b"x" * 199999 + b'"}'
    with peer(saying(answer)) as url:
        assert request(url, timeout_seconds=5) == {"a": "x" * 199999}
    with peer(saying(b"HTTP/1.1 200 OK\r\n\r\nup")) as url:
        assert request(url, timeout_seconds=5) == "up"
        assert responds(url)
    with peer(saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n")) as url:
        assert request(url, {}, timeout_seconds=5) == [1]
