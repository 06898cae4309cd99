"""Engine arguments of one group of ``--sglang-config``, read as if they stood on the command line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from slime.config.deployment import ModelDeployment, ServerGroup
from slime.config.draft import Draft
from slime.config.embedded_flags import check_embedded_flags
from slime.config.engine_plan import gets_weights
from slime.config.families import PrefixFamily, plain_json
from slime.config.sglang_checks import split_problems, stage_problems
from slime.errors import ConfigError


def check_overrides(draft: Draft, family: PrefixFamily, values: Mapping[str, Any]) -> None:
    """Let the engine's own family read every override; the deployment then holds canonical names and typed values.

    Args:
        draft: With the deployment, which is replaced; gets the problems.
        family: The engine's flags.
        values: The engine's values for all groups, by attribute name.
    """
    draft.deployment = tuple(_of_model(draft, family, values, model) for model in draft.deployment)


def _of_model(draft: Draft, family: PrefixFamily, values: Mapping[str, Any], model: ModelDeployment) -> ModelDeployment:
    groups: list[ServerGroup] = []
    for group in model.server_groups:
        problems: list[str] = []
        overrides = _read(family, group.overrides, problems)
        before = len(draft.problems)
        check_embedded_flags(draft, overrides)
        problems += draft.problems[before:]
        del draft.problems[before:]
        if draft.engine.rollout_backend == "sglang" and group.worker_type != "placeholder":
            per_engine = group.per_engine(draft.cluster.rollout_num_gpus_per_engine)
            problems += split_problems(per_engine, {**values, **overrides})
            if gets_weights(model, draft.rollout.hf_checkpoint) and group.worker_type != "encoder":
                problems += stage_problems(draft, {**values, **overrides})
        where = f"{group.place}.overrides" if group.overrides else group.place
        draft.problems += [f"{where}: {problem}" for problem in problems]
        groups.append(replace(group, overrides=overrides))
    return replace(model, server_groups=tuple(groups))


def _read(family: PrefixFamily, overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    refused, known = family.refused(), family.flag_names()
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        flag = family.prefix + name.replace("_", "-")
        if flag in refused:
            problems.append(f"{name} cannot be given: {refused[flag]}")
        elif flag not in known:
            problems.append(_unknown(name, family))
        elif value is None or value is False:
            values[name] = value  # takes back what the command line says for all groups
        else:
            try:
                values.update(plain_json(family.parse([[flag, *_words(value)]], known=known), "override"))
            except ConfigError as error:
                problems += error.problems
    return values


def _unknown(name: str, family: PrefixFamily) -> str:
    known = sorted(flag.removeprefix(family.prefix).replace("-", "_") for flag in family.flag_names())
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else "docs/flags.md lists them under Engine flags"
    return f"unknown argument {name!r}; {hint}"


def _words(value: Any) -> list[str]:
    """A YAML value as the words of a command line."""
    if value is True:
        return []
    if isinstance(value, list):
        return [str(item) for item in cast("list[Any]", value)]
    return [json.dumps(value) if isinstance(value, Mapping) else str(value)]
