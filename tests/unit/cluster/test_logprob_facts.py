"""What engines of every version say of how they compute."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.cluster.logprob_facts import logprob_facts
from slime.config import Config


@pytest.mark.parametrize("known", ["/server_info", "/get_server_info"])
def test_an_engine_is_asked_at_the_address_that_its_version_knows(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == known else 404)
            self.end_headers()
            self.wfile.write(b'{"dtype": "bfloat16"}')

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setattr("slime.cluster.logprob_facts.trainer_facts", lambda config: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        facts = logprob_facts(Config(), [f"http://127.0.0.1:{server.server_port}"])
    finally:
        server.shutdown()
        server.server_close()
    assert facts.engine.precision == "bf16"
