"""What every test process needs before torch is imported, and the server that several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.sglang.servers import Server

# Several processes of one test share few cores, and OpenMP threads of one that spin keep the others from running:
# with the default of one thread per core in each, tests of parallel layouts take minutes instead of seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run, and no limit on the time of one, which a busy machine would exceed.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def sglang_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real SGLang server of a tiny Qwen3 for all tests that leave its weights alone; needs SGLang installed."""
    from tests.sglang.servers import sglang_server
    from tests.support.tiny_models import make_tiny_model

    model = make_tiny_model(tmp_path_factory.mktemp("sglang") / "qwen3", "qwen3")
    with sglang_server(model) as server:
        yield server
