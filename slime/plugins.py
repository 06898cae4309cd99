"""Load a user's function or class from a path, and check its signature before anything starts.

Accepted paths: ``pkg.module.attr``, ``pkg.module:attr``, ``dir/file.py:attr`` and a bare ``file.py``,
which resolves to a conventional name by kind. Nothing is cached here: an owner loads once and keeps the
object. Tests hold that every failure names the flag and the path.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from slime.errors import PluginError

PluginKind = Literal["generate", "reward", "other"]

CONVENTIONAL_NAMES: dict[PluginKind, tuple[str, ...]] = {
    "generate": ("custom_generate", "generate"),
    "reward": ("CustomRewardModel", "custom_rm", "reward_func"),
    "other": (),
}
"""What a bare ``file.py`` is searched for, first match wins."""


def load_plugin(path: str, *, flag: str, kind: PluginKind = "other") -> Any:
    """Load what ``path`` names.

    Args:
        path: Dotted path, ``module:attr``, ``file.py:attr`` or ``file.py`` (relative to the working directory).
        flag: The flag the path came from, for messages.
        kind: Which conventional names a bare file is searched for.

    Raises:
        PluginError: No such file, module or attribute, or the import itself failed.
    """
    location, attribute = split_plugin_path(path, flag=flag)
    module = _import_file(location, path, flag) if location.endswith(".py") else _import_module(location, path, flag)
    if attribute is None:
        return _conventional(module, path, flag, kind)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = ", ".join(_public_callables(module)) or "none"
            raise PluginError(f"{flag} {path}: {location} has no {attribute!r}; its public callables: {public}")
        target = getattr(target, part)
    return target


def split_plugin_path(path: str, *, flag: str) -> tuple[str, str | None]:
    """``(module or file, attribute)``; the attribute of a bare file is None.

    Raises:
        PluginError: The text has none of the accepted forms.
    """
    if path.endswith(".py"):
        return path, None
    location, colon, attribute = path.rpartition(":")
    if not colon:
        location, _, attribute = path.rpartition(".")
    is_name = all(part.isidentifier() for part in attribute.split("."))
    is_location = location.endswith(".py") or all(part.isidentifier() for part in location.split("."))
    if not location or not is_name or not is_location:
        raise PluginError(
            f"{flag} {path}: not a path to a function; write pkg.module.function, pkg.module:function, "
            "dir/file.py:function or dir/file.py"
        )
    return location, attribute


def _import_file(location: str, path: str, flag: str) -> ModuleType:
    file = Path(location).expanduser()
    if not file.is_file():
        raise PluginError(f"{flag} {path}: no such file ({file.absolute()})")
    file = file.resolve()
    # The name is stable over processes, so that objects of the module can be pickled between them.
    name = f"slime_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PluginError(f"{flag} {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # plug-in boundary: user code may raise anything while it is imported
        del sys.modules[name]
        raise PluginError(f"{flag} {path}: importing the file failed: {type(error).__name__}: {error}") from error
    return module


def _import_module(location: str, path: str, flag: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        missing = error.name or location
        if location == missing or location.startswith(missing + "."):
            hint = f"; for a file write {location.replace('.', '/')}.py:function" if "." in location else ""
            raise PluginError(f"{flag} {path}: no module named {missing!r}{hint}") from error
        raise PluginError(f"{flag} {path}: {location} needs the module {missing!r}, which is not installed") from error
    except Exception as error:  # plug-in boundary: user code may raise anything while it is imported
        raise PluginError(f"{flag} {path}: importing {location} failed: {type(error).__name__}: {error}") from error


def _public_callables(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and inspect.getmodule(value) is module
    ]


def _conventional(module: ModuleType, path: str, flag: str, kind: PluginKind) -> Any:
    for name in CONVENTIONAL_NAMES[kind]:
        if hasattr(module, name):
            return getattr(module, name)
    candidates = _public_callables(module)
    if not CONVENTIONAL_NAMES[kind] and len(candidates) == 1:
        return getattr(module, candidates[0])
    expected = " or ".join(CONVENTIONAL_NAMES[kind]) or "exactly one public function"
    found = ", ".join(candidates) or "none"
    example = candidates[0] if candidates else "function"
    raise PluginError(
        f"{flag} {path}: the file must define {expected}; public callables found: {found}. Name one: {path}:{example}"
    )


def check_signature(
    target: Callable[..., Any], *, flag: str, expected: str, required: Sequence[str], keywords: Sequence[str] = ()
) -> None:
    """Check that ``target`` can be called with the arguments that slime passes.

    Positional ones may have any name in the target; ``*args`` and ``**kwargs`` take anything.

    Args:
        target: Function or class.
        flag: The flag it came from.
        expected: The whole signature, as shown to the user.
        required: Arguments passed by position, in order; a target may also take all of them by name.
        keywords: Arguments passed by name.

    Raises:
        PluginError: Not callable, or it cannot be called that way.
    """
    if not callable(target):
        raise PluginError(f"{flag}: {target!r} is not callable; expected {expected}")
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # builtins and C extensions have no readable signature
    named = dict.fromkeys(keywords)
    try:
        signature.bind(*[None] * len(required), **named)
        return
    except TypeError:
        named |= dict.fromkeys(required)
    try:
        signature.bind(**named)
    except TypeError as error:
        name = getattr(target, "__name__", repr(target))
        raise PluginError(f"{flag}: {name}{signature} does not fit; expected {expected} ({error})") from None
