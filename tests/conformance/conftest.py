"""Both engines, each directly and behind the real router; SGLang only where it can run (``make test-sglang``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.targets import Reference, Target
from tests.sglang.servers import can_run_sglang
from tests.support.engine_process import engine_process, router_process
from tests.support.tiny_models import make_tiny_model

KINDS = ("embedded", "sglang") if can_run_sglang() else ("embedded",)


@pytest.fixture(scope="session")
def embedded_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    model = make_tiny_model(tmp_path_factory.mktemp("conformance") / "qwen3", "qwen3", num_hidden_layers=4)
    with engine_process(model, "--max-total-tokens", "100000") as url:
        yield Target("embedded", url, url, model)


@pytest.fixture(scope="session")
def sglang_target(request: pytest.FixtureRequest) -> Target:
    server = request.getfixturevalue("sglang_engine")
    return Target("sglang", server.url, server.url, server.model_path)


@pytest.fixture(scope="session", params=KINDS)
def direct(request: pytest.FixtureRequest) -> Target:
    """An engine, asked directly."""
    return request.getfixturevalue(f"{request.param}_target")


@pytest.fixture(scope="session", params=("direct", "router"))
def target(request: pytest.FixtureRequest, direct: Target) -> Iterator[Target]:
    """An engine, asked directly and through a router."""
    if request.param == "direct":
        yield direct
        return
    with router_process([direct.url]) as url:
        yield Target(direct.kind, direct.url, url, direct.model_path)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory, direct: Target) -> Path:
    """A model of the same shape with other weights."""
    layers = 4 if direct.kind == "embedded" else 2
    path = tmp_path_factory.mktemp("other") / f"qwen3_{direct.kind}"
    return make_tiny_model(path, "qwen3", seed=1, num_hidden_layers=layers)


@pytest.fixture(scope="session")
def reference(direct: Target) -> Reference:
    return Reference(direct.model_path)


@pytest.fixture(scope="session")
def other_reference(other_model: Path) -> Reference:
    return Reference(other_model)


@pytest.fixture
def restored(direct: Target) -> Iterator[None]:
    """Brings the weights of the start back, and their version."""
    yield
    direct.post("/continue_generation")
    direct.post("/update_weights_from_disk", {"model_path": str(direct.model_path), "weight_version": "default"})
