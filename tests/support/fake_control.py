"""An engine's control endpoints without an engine: every request is recorded and answered with a chosen status."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


def _accept(path: str, body: Any) -> int:
    return 200


class ControlRecorder:
    """A server on a free local port; a context manager.

    Args:
        answer: Path without query, and body, to an HTTP status. May be replaced at any time.
        info: What it says of itself on ``GET /server_info``.
    """

    def __init__(self, answer: Callable[[str, Any], int] = _accept, info: dict[str, Any] | None = None) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.bodies: dict[str, Any] = {}
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
                path = self.path.partition("?")[0]
                recorder.asked.append(path)
                recorder.bodies[path] = body
                self.send_response(recorder.answer(path, body))
                self.end_headers()

            def do_GET(self) -> None:
                content = json.dumps(info or {}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.server.shutdown()
        self.server.server_close()
