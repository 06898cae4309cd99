"""What the command line asks of the machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.cli import load_config, read_surroundings
from slime.errors import ConfigError, SlimeError


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Two engines that answer when both have been asked."""
    both = threading.Barrier(2, timeout=5)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            both.wait()
            body = json.dumps({"port": self.server.server_address[1]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    yield [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


def test_engines_are_asked_at_the_same_time(urls: list[str]) -> None:
    ask = read_surroundings().query_engines
    assert ask is not None
    answers = ask(urls)
    assert [f"http://127.0.0.1:{answer['port']}" for answer in answers if isinstance(answer, dict)] == urls


def test_each_engine_that_does_not_answer_is_an_error_of_its_own() -> None:
    ask = read_surroundings().query_engines
    assert ask is not None
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    for url, answer in zip(urls, ask(urls), strict=True):
        assert isinstance(answer, SlimeError)
        assert str(answer).count(url) == 1


def test_the_loop_of_the_program_is_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--colocate"], loop="ahead")
    assert any("so --colocate is not possible; use train.py" in problem for problem in caught.value.problems)
