"""A tiny model's folder and fake engines for the rollout's unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte-level tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine():
    """A bare fake engine."""
    with FakeEngine() as running:
        yield running
