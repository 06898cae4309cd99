from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from slime.errors import PluginError
from slime.plugins import PluginKind, check_signature, load_plugin, split_plugin_path


def write(tmp_path: Path, text: str, name: str = "plugin.py") -> str:
    file = tmp_path / name
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("path", ["os.path.join", "os.path:join"])
def test_module_forms(path: str) -> None:
    import os

    assert load_plugin(path, flag="--x") is os.path.join


def test_nested_attribute() -> None:
    assert load_plugin("pathlib:Path.cwd", flag="--x").__func__ is Path.cwd.__func__


def test_file_forms(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(): return 1\ndef g(): return 2\n")
    assert load_plugin(f"{path}:g", flag="--x")() == 2


@pytest.mark.parametrize(
    ("kind", "text", "name"),
    [
        ("generate", "async def generate(): ...\nasync def custom_generate(): ...\n", "custom_generate"),
        ("generate", "async def generate(): ...\ndef helper(): ...\n", "generate"),
        ("reward", "class CustomRewardModel: ...\ndef custom_rm(): ...\n", "CustomRewardModel"),
        ("reward", "def reward_func(): ...\n", "reward_func"),
        ("other", "import os\nfrom os.path import join\ndef only(): ...\ndef _private(): ...\n", "only"),
    ],
)
def test_bare_files_resolve_by_kind(tmp_path: Path, kind: PluginKind, text: str, name: str) -> None:
    assert load_plugin(write(tmp_path, text), flag="--x", kind=kind).__name__ == name


def test_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "def f(): return 5\n", "near.py")
    monkeypatch.chdir(tmp_path)
    assert load_plugin("near.py:f", flag="--x")() == 5


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module_x.f", "no module named 'no_such_module_x'"),
        ("os.path.nothing", "has no 'nothing'"),
        ("nowhere/file.py:f", "no such file"),
        ("nowhere.py", "no such file"),
        ("justaname", "not a path to a function"),
        ("a b.c", "not a path to a function"),
        ("dir/file.f", "not a path to a function"),
    ],
)
def test_faults_name_flag_and_path(path: str, words: str) -> None:
    with pytest.raises(PluginError) as caught:
        load_plugin(path, flag="--my-flag")
    assert words in str(caught.value)
    assert f"--my-flag {path}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module_y\n", "ModuleNotFoundError"),
        ("raise RuntimeError('broken')\n", "RuntimeError: broken"),
        ("def (\n", "SyntaxError"),
        ("def a(): ...\ndef b(): ...\n", "found: a, b"),
        ("x = 1\n", "found: none"),
    ],
)
def test_unusable_files(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PluginError, match=words) as caught:
        load_plugin(path, flag="--my-flag")
    assert path in str(caught.value)


def test_a_file_that_failed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "raise ValueError\n")
    with pytest.raises(PluginError):
        load_plugin(path, flag="--x")
    write(tmp_path, "def f(): return 1\n")
    assert load_plugin(path, flag="--x")() == 1


def test_missing_dependency_of_a_module_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "import no_such_module_z\n", "slime_test_needs_z.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="needs the module 'no_such_module_z'"):
        load_plugin("slime_test_needs_z.f", flag="--x")


def test_split() -> None:
    assert split_plugin_path("a.b.c", flag="--x") == ("a.b", "c")
    assert split_plugin_path("d/e.py:f", flag="--x") == ("d/e.py", "f")
    assert split_plugin_path("e.py", flag="--x") == ("e.py", None)


def _three(args: Any, rollout_id: Any, data: Any) -> None: ...
def _defaults(args: Any, rollout_id: Any, data: Any, extra: Any = None) -> None: ...
def _star(*args: Any, **kwargs: Any) -> None: ...
def _keywords(*, args: Any, rollout_id: Any, data: Any) -> None: ...
def _two(args: Any, data: Any) -> None: ...
def _four(a: Any, b: Any, c: Any, d: Any) -> None: ...


class _Class:
    def __init__(self, args: Any, rollout_id: Any, data: Any) -> None: ...


class _Callable:
    def __call__(self, args: Any, rollout_id: Any, data: Any) -> None: ...


REQUIRED = ("args", "rollout_id", "data")


@pytest.mark.parametrize(
    "target", [_three, _defaults, _star, _keywords, _Class, _Callable(), functools.partial(_four, 1)]
)
def test_fitting_signatures(target: Any) -> None:
    check_signature(target, flag="--x", expected="fn(args, rollout_id, data)", required=REQUIRED)


@pytest.mark.parametrize("target", [_two, _four, 3])
def test_signatures_that_do_not_fit(target: Any) -> None:
    with pytest.raises(PluginError, match=r"--x.*expected fn\(args, rollout_id, data\)"):
        check_signature(target, flag="--x", expected="fn(args, rollout_id, data)", required=REQUIRED)
