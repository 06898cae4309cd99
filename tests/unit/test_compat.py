"""Established import paths: every row of the table, the errors, and what `import slime` costs."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from slime.compat import ESTABLISHED, EstablishedFinder, established_packages, install

ROWS = [(module, name, target) for module, names in ESTABLISHED.items() for name, target in names.items()]


@pytest.mark.parametrize(("module", "name", "target"), ROWS, ids=[f"{m}.{n}" for m, n, _ in ROWS])
def test_every_row_resolves_to_the_very_same_object(module, name, target):
    location, _, attribute = target.partition(":")
    expected = getattr(importlib.import_module(location), attribute)
    scope: dict[str, object] = {}
    exec(f"from {module} import {name} as found", scope)
    assert scope["found"] is expected


def test_no_row_is_shadowed_by_a_real_module():
    for module in [*ESTABLISHED, *established_packages()]:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        if module not in ("slime.rollout", "slime.backends", "slime.observability"):
            assert isinstance(spec.loader, EstablishedFinder), module


def test_packages_and_submodules():
    import slime.rollout.filter_hub.base_types as base_types
    import slime.utils
    from slime.utils import types

    assert types is sys.modules["slime.utils.types"]
    assert slime.utils.types is types
    assert not hasattr(base_types, "anything_else")
    assert "DynamicFilterOutput" in dir(base_types)


def test_missing_names_say_what_there_is():
    with pytest.raises(ImportError, match=r"'Sampel' from 'slime.utils.types' .*offers .*ParamInfo.*Sample"):
        exec("from slime.utils.types import Sampel")
    with pytest.raises(ImportError, match=r"'typse' from 'slime.utils' .*offers .*types"):
        exec("from slime.utils import typse")
    with pytest.raises(ModuleNotFoundError, match=r"slime\.utils\.typse"):
        importlib.import_module("slime.utils.typse")


def test_install_is_idempotent():
    install()
    assert sum(isinstance(finder, EstablishedFinder) for finder in sys.meta_path) == 1


def test_import_slime_loads_nothing_heavy():
    code = (
        "import sys, slime; heavy = {'torch', 'ray', 'transformers', 'numpy', 'aiohttp'} & set(sys.modules); "
        "assert not heavy, heavy; assert 'slime.types' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr


def test_established_names_load_through_plugin_paths():
    from slime.plugins import load_plugin
    from slime.rollout.pipeline import generate_rollout

    path = "slime.rollout.sglang_rollout.generate_rollout"
    assert load_plugin(path, flag="--rollout-function-path", kind="other") is generate_rollout
