"""An embedded engine behind the real router, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_process import engine_process, router_process
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte-level tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="session")
def router_url(model_path: Path) -> Iterator[str]:
    """The router's URL."""
    with engine_process(model_path) as engine, router_process([engine]) as router:
        yield router
