"""HTTP connections whose whole exchange ends at a deadline.

The standard library's time-out holds for each operation of the socket, so that a peer that sends a byte now and then
is never given up. Tests hold: such a peer is, in its headers and in its body.
"""

from __future__ import annotations

import io
import socket
import time
import urllib.request
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from typing import Any, cast


class _BoundedReader(io.RawIOBase):
    """What a socket receives until the deadline."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, deadline: float) -> None:
        self._sock = sock
        self._raw = raw
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return cast(Any, self._raw).readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _BoundedResponse(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_BoundedReader(sock, self.fp.detach(), deadline))


class _BoundedConnection(HTTPConnection):
    def __init__(self, host: str, *, timeout: float) -> None:
        super().__init__(host, timeout=timeout)
        self.response_class = cast(Any, partial(_BoundedResponse, deadline=time.monotonic() + timeout))


class _BoundedHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(cast(Any, _BoundedConnection), req)


def bounded_opener() -> urllib.request.OpenerDirector:
    """An opener whose ``timeout`` bounds each exchange as a whole; proxies of the environment are ignored."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _BoundedHandler())
