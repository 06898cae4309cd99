"""Which models the engines serve and in which groups: the content of ``--sglang-config``.

Owns the file's form and everything that can be said of it alone; ``rules.deployment`` brings it together with the
flags. Tests hold: each wrong entry is one problem that names its place in the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from slime.config.yaml_file import read_yaml
from slime.errors import ConfigError

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder", "encoder")
"""``placeholder`` reserves GPUs and starts nothing; ``encoder`` serves the vision part of a multimodal model."""

_ROOT = "sglang"
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroup:
    """Engines that are alike.

    Args:
        worker_type: One of ``WORKER_TYPES``.
        num_gpus: GPUs (on a CPU: processes) of the group.
        num_gpus_per_engine: GPUs of one engine; None for ``--rollout-num-gpus-per-engine``.
        overrides: Engine arguments of this group, by their attribute names.
        place: Where it was asked for, for messages.
    """

    worker_type: str = "regular"
    num_gpus: int
    num_gpus_per_engine: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: str = field(default="", compare=False)

    def per_engine(self, default: int) -> int:
        """GPUs of one engine."""
        return self.num_gpus_per_engine or default

    def num_engines(self, default: int) -> int:
        """Engines of the group; none for a placeholder."""
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.per_engine(default)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeployment:
    """One served model, with a router of its own.

    Args:
        name: Under which ``args.sglang_model_routers`` has its router.
        model_path: None for ``--hf-checkpoint``.
        update_weights: Whether it gets the trainer's weights; None when ``model_path`` decides.
        server_groups: Its engines.
    """

    name: str
    model_path: str | None = None
    update_weights: bool | None = None
    server_groups: tuple[ServerGroup, ...]

    @property
    def num_gpus(self) -> int:
        """GPUs of all its groups."""
        return sum(group.num_gpus for group in self.server_groups)

    @property
    def worker_types(self) -> frozenset[str]:
        """Kinds of engines it has."""
        return frozenset(group.worker_type for group in self.server_groups)


def read_deployment(path: str, problems: list[str]) -> tuple[ModelDeployment, ...]:
    """Read a deployment file.

    Args:
        path: The YAML file.
        problems: Receives what is wrong with it, each with its place.

    Returns:
        The models; empty when the file cannot be used at all.
    """
    where = f"--sglang-config {path}"
    try:
        content = read_yaml(path, where)
    except ConfigError as error:
        problems += error.problems
        return ()
    if not isinstance(content, Mapping) or _ROOT not in content:
        problems.append(f"{where}: has no key {_ROOT!r} at its root; a list of models is expected under it")
        return ()
    root = cast("Mapping[Any, Any]", content)
    _check_keys(root, (_ROOT,), where, problems)
    models: Any = root[_ROOT]
    if not isinstance(models, list) or not models:
        problems.append(f"{where}: {_ROOT} must be a list of at least one model, found {models!r:.80}")
        return ()
    entries = list(_mappings(cast("list[Any]", models), f"{where}: {_ROOT}", problems))
    deployments = [_model(place, entry, problems) for place, entry in entries]
    found = [deployment for deployment in deployments if deployment is not None]
    names = [deployment.name for deployment in found]
    problems += [
        f"{where}: {names.count(name)} models are named {name!r}; each needs a name of its own"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    return tuple(found)


def _model(where: str, entry: Mapping[Any, Any], problems: list[str]) -> ModelDeployment | None:
    before = len(problems)
    _check_keys(entry, _MODEL_KEYS, where, problems)
    if "server_groups" in entry and "engine_groups" in entry:
        problems.append(f"{where}: server_groups and engine_groups are the same; give one")
    listed: Any = entry.get("server_groups", entry.get("engine_groups"))
    if not isinstance(listed, list) or not listed:
        problems.append(f"{where}: server_groups must be a list of at least one group, found {listed!r:.80}")
        listed = []
    default = _value(entry, "num_gpus_per_engine", int, where, problems)
    groups = [
        _group(place, group, default, problems)
        for place, group in _mappings(cast("list[Any]", listed), f"{where}.server_groups", problems)
    ]
    name = _value(entry, "name", str, where, problems, required=True)
    update = _value(entry, "update_weights", bool, where, problems)
    paths = [_value(entry, "model_path", str, where, problems)]
    paths += [_value(group.overrides, "model_path", str, where, problems) for group in groups if group is not None]
    own = list(dict.fromkeys(path for path in paths if path is not None))
    if len(own) > 1:
        problems.append(f"{where}: one model has one model_path, found {' and '.join(own)}; list them as two models")
    if len(problems) > before:
        return None
    plain = [
        ServerGroup(
            worker_type=group.worker_type,
            num_gpus=group.num_gpus,
            num_gpus_per_engine=group.num_gpus_per_engine,
            overrides={key: value for key, value in group.overrides.items() if key != "model_path"},
            place=group.place,
        )
        for group in groups
        if group is not None
    ]
    return ModelDeployment(
        name=name, model_path=own[0] if own else None, update_weights=update, server_groups=tuple(plain)
    )


def _group(where: str, entry: Mapping[Any, Any], default: int | None, problems: list[str]) -> ServerGroup | None:
    before = len(problems)
    _check_keys(entry, _GROUP_KEYS, where, problems)
    worker_type = _value(entry, "worker_type", str, where, problems) or "regular"
    if worker_type not in WORKER_TYPES:
        problems.append(f"{where}: worker_type {worker_type!r}; accepted values are {', '.join(WORKER_TYPES)}")
    num_gpus = _value(entry, "num_gpus", int, where, problems, required=True)
    per_engine = _value(entry, "num_gpus_per_engine", int, where, problems)
    overrides: Any = entry.get("overrides") or {}
    if not isinstance(overrides, Mapping) or not all(isinstance(k, str) for k in cast("Mapping[Any, Any]", overrides)):
        problems.append(f"{where}: overrides must map engine arguments to values, found {overrides!r:.80}")
        overrides = {}
    if len(problems) > before:
        return None
    return ServerGroup(
        worker_type=worker_type,
        num_gpus=num_gpus,
        num_gpus_per_engine=per_engine or default,
        overrides=dict(cast("Mapping[str, Any]", overrides)),
        place=where,
    )


def _mappings(items: list[Any], where: str, problems: list[str]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Each entry of a list with its place; what is no mapping is a problem."""
    for index, item in enumerate(items):
        place = f"{where}[{index}]"
        if isinstance(item, Mapping):
            yield place, cast("Mapping[Any, Any]", item)
        else:
            problems.append(f"{place}: must be a mapping, found {item!r:.80}")


def _check_keys(entry: Mapping[Any, Any], known: tuple[str, ...], where: str, problems: list[str]) -> None:
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"accepted keys are {', '.join(known)}"
            problems.append(f"{where}: unknown key {key!r}; {hint}")


def _value(
    entry: Mapping[Any, Any], key: str, kind: type, where: str, problems: list[str], *, required: bool = False
) -> Any:
    """The value of a key if it has the right type; counts are at least 1."""
    value: Any = entry.get(key)
    if value is None:
        if required:
            problems.append(f"{where}: {key} is missing")
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        problems.append(f"{where}: {key} must be {_KIND_NAMES[kind]}, found {value!r}")
        return None
    if kind is int and value < 1:
        problems.append(f"{where}: {key} must be at least 1, found {value}")
        return None
    return value


_KIND_NAMES: Mapping[type, str] = {int: "an integer", str: "a text", bool: "true or false"}
