"""A replacement that fails in a way nobody foresaw."""

from __future__ import annotations

from typing import Any, cast

import pytest

from slime.cluster.replacement import Replacement
from slime.errors import EngineError


class Server:
    name = "engine 3"

    def kill(self) -> None:
        pass

    def launch(self) -> None:
        raise KeyError("port")


def test_whatever_ends_a_replacement_is_its_error(caplog: pytest.LogCaptureFixture) -> None:
    replacement = Replacement(cast(Any, Server()), prepare=lambda: None, finish=lambda: None, timeout_seconds=5.0)
    replacement.cancel(5.0)
    assert replacement.is_done
    assert isinstance(replacement.error, EngineError)
    assert str(replacement.error) == "the replacement of engine 3 failed: KeyError: 'port'"
    assert "Traceback" in caplog.text
