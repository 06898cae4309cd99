"""One tiny model and engine processes over it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_process import engine_process
from tests.support.tiny_models import make_tiny_model

Post = Callable[..., Any]


def post(url: str, path: str, body: Any = None, *, expect: int = 200, method: str = "POST") -> Any:
    """Send JSON; the parsed answer (or its text), after checking the status."""
    data = None if method == "GET" else json.dumps(body if body is not None else {}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, content = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    assert status == expect, (status, content)
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        return content.decode()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3")


@pytest.fixture(scope="session")
def shared_engine(model_path: Path) -> Iterator[str]:
    with engine_process(model_path, "--max-total-tokens", "100000") as url:
        yield url


@pytest.fixture
def engine(shared_engine: str) -> Iterator[str]:
    """The shared engine; every test must leave it running, complete and idle."""
    yield shared_engine
    state = post(shared_engine, "/server_info", method="GET")["internal_states"][0]
    assert (state["paused"], state["released"], state["is_updating"]) == (None, [], False)
    assert post(shared_engine, "/flush_cache?timeout=5").startswith("Cache flushed")
