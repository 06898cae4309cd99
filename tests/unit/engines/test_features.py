"""What is concluded from what an engine says about itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import orjson
import pytest

from slime.engines.features import EngineFeatures, ask_features, features_of
from slime.errors import EngineError
from slime.http_control import HttpStatusError

SGLANG_0_5_23 = {
    "model_path": "/models/tiny",
    "dtype": "float32",
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "weight_version": "default",
    "disaggregation_mode": "null",
    "internal_states": [{"dtype": "float32", "effective_max_running_requests_per_dp": 32}],
    "startup_time": 17.2,
    "version": "0.5.23",
    "frontend": "python",
}
"""Recorded from a server on a CPU, without most of its 500 settings."""
SGLANG_0_5_15 = {
    "model_path": "/models/tiny",
    "dtype": "auto",
    "tp_size": 4,
    "pp_size": 2,
    "dp_size": 1,
    "status": "ready",
    "max_total_num_tokens": 32768,
    "internal_states": [{"dtype": "auto"}],
    "version": "0.5.15.post1",
    "kv_events": None,
}
"""The same of the version in which the report had this form."""
EMBEDDED = {"version": "slime-embedded", "engine": "embedded", "dtype": "bfloat16", "tp_size": 1, "pp_size": 1}


def test_newest_recorded_server() -> None:
    assert features_of(SGLANG_0_5_23) == EngineFeatures(
        backend="sglang",
        version="0.5.23",
        update_bracket=True,
        flushes_past_waiting=True,
        survives_refused_flush=True,
        has_version_spans=True,
        keeps_routes=False,
        names_parts=False,
        dtype="float32",
        tp_size=2,
    )


def test_oldest_supported_server() -> None:
    assert features_of(SGLANG_0_5_15) == EngineFeatures(
        backend="sglang",
        version="0.5.15.post1",
        update_bracket=False,
        flushes_past_waiting=False,
        survives_refused_flush=False,
        has_version_spans=False,
        keeps_routes=False,
        names_parts=False,
        dtype=None,
        tp_size=4,
        pp_size=2,
    )


def test_embedded_engine_has_everything() -> None:
    features = features_of(EMBEDDED)
    assert features.backend == "embedded"
    assert features.update_bracket
    assert features.flushes_past_waiting
    assert features.survives_refused_flush
    assert features.has_version_spans
    assert features.keeps_routes
    assert features.names_parts
    assert features.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("version", "bracket", "flushes", "survives", "spans"),
    [
        ("0.5.18", False, False, False, False),
        ("0.5.19", False, False, False, True),
        ("0.5.20.post2", False, False, False, True),
        ("0.5.21", True, True, False, True),
        ("v0.5.22+cu130", True, True, True, True),
        ("0.6.0", True, True, True, True),
        ("0.5.21.dev7+g1a2b3c", None, False, False, True),  # made before 0.5.21 was finished
        ("0.5.22rc1", None, True, False, True),
        ("0.0.0.dev1+g1a2b3c", None, False, False, False),  # a checkout without tags
        ("unknown", None, False, False, False),
        (None, None, False, False, False),
    ],
)
def test_versions(version: str | None, bracket: bool | None, flushes: bool, survives: bool, spans: bool) -> None:
    found = features_of({**SGLANG_0_5_23, "version": version})
    assert found.update_bracket is bracket
    assert (found.flushes_past_waiting, found.survives_refused_flush, found.has_version_spans) == (
        flushes,
        survives,
        spans,
    )


@contextmanager
def server(replies: Mapping[str, tuple[int, Any]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = replies.get(self.path, (404, {"detail": "Not Found"}))
            content = orjson.dumps(body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join(5)
        httpd.server_close()


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_both_addresses_of_the_report_are_tried(path: str) -> None:
    with server({path: (200, SGLANG_0_5_15)}) as url:
        assert ask_features(url, timeout_seconds=5) == features_of(SGLANG_0_5_15)


def test_what_is_no_engine_is_named() -> None:
    with server({}) as url, pytest.raises(HttpStatusError, match="404"):
        ask_features(url, timeout_seconds=5)
    with server({"/server_info": (200, ["a", "list"])}) as url, pytest.raises(EngineError, match="JSON object"):
        ask_features(url, timeout_seconds=5)
    with server({"/server_info": (503, {})}) as url, pytest.raises(HttpStatusError, match="503"):
        ask_features(url, timeout_seconds=5)
