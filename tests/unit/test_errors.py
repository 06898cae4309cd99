"""Every error of the package survives the way from one process to another."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.errors import SlimeError

# Importing it installs torch and Megatron hooks; it defines no errors, which the test below makes sure of.
_HEAVY = "slime.backends.megatron"


def all_errors() -> list[type[SlimeError]]:
    """Every subclass of SlimeError in the package."""
    for module in pkgutil.walk_packages(slime.__path__, "slime."):
        if not module.name.startswith(_HEAVY) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: list[type[SlimeError]] = []
    waiting: list[type[SlimeError]] = [SlimeError]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        found.append(cls)
    return sorted({c for c in found if c.__module__.startswith("slime.")}, key=lambda c: (c.__module__, c.__name__))


def make(cls: type[SlimeError]) -> SlimeError:
    """An error with a value for every parameter that has no default."""
    values: dict[str, Any] = {"status": 418}
    positional, named = ["what was found"], {}
    own_init = next(c for c in cls.__mro__ if "__init__" in vars(c))
    if issubclass(own_init, SlimeError):
        parameters = list(inspect.signature(cls).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = values.get(parameter.name, "value")
            elif parameter.default is parameter.empty:
                positional.append(values.get(parameter.name, "value"))
    return cls(*positional, **named)


@pytest.mark.timeout(60)
def test_errors_survive_pickling() -> None:
    errors = all_errors()
    assert len(errors) > 12
    for cls in errors:
        error = make(cls)
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is cls, cls
        assert str(copy) == str(error), cls
        assert vars(copy) == vars(error), cls


def test_heavy_modules_define_no_errors() -> None:
    folder = Path(slime.__path__[0]) / "backends" / "megatron"
    for path in folder.rglob("*.py"):
        classes = [line for line in path.read_text().splitlines() if line.startswith("class ")]
        assert not any("Error(" in line for line in classes), path
