"""``--megatron-config-path``: what the actor and the critic do differently, and the critic's own configuration.

The YAML file is a list of items, at most one per role, whose ``overrides`` are flags of the command line
with other values for that role. Owns the file's form, which flags a role may change, and ``RoleConfig``:
the sections of the critic's configuration that are not the actor's. How these come about is ``critic``'s.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from slime.config.custom_file import megatron_group, set_value
from slime.config.families import MegatronConfig
from slime.config.flags import FlagSpec
from slime.config.sections import AlgorithmConfig, CheckpointConfig, DataConfig, TrainConfig
from slime.config.tokens import FlagGroup
from slime.config.yaml_file import read_yaml
from slime.errors import ConfigError

if TYPE_CHECKING:
    from slime.config.schema import Config

Role = Literal["actor", "critic"]
ROLES: tuple[Role, ...] = ("actor", "critic")

_SHARED = frozenset({"custom_config_path", "megatron_config_path", "train_backend", "release_train"})
_PER_ROLE: Mapping[str, frozenset[str]] = {
    "data": frozenset(
        {
            "micro_batch_size",
            "use_dynamic_batch_size",
            "max_tokens_per_gpu",
            "log_probs_max_tokens_per_gpu",
            "balance_data",
            "balance_by_flops",
            "data_pad_size_multiplier",
        }
    ),
    "checkpoint": frozenset({"load", "ckpt_step", "save", "no_save_optim"}),
}
_OF_CRITIC = frozenset({"value_clip", "calculate_per_token_loss", "reset_optimizer_states"})
_ONE_ESTIMATOR = frozenset({"advantage_estimator", "num_critic_only_steps", "gamma", "lambd", "value_clip"})
_IGNORED = frozenset({"num_nodes", "num_gpus_per_node"})
"""Established keys: both roles occupy ``--actor-num-nodes`` x ``--actor-num-gpus-per-node`` processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """Sections of a role's configuration that may differ from the actor's."""

    train: TrainConfig
    data: DataConfig
    algorithm: AlgorithmConfig
    checkpoint: CheckpointConfig
    megatron: MegatronConfig


@dataclass(slots=True, kw_only=True)
class RoleOverrides:
    """One item of the file.

    Attributes:
        values: Field of ours -> value.
        megatron: Megatron's flags as tokens.
        without: Megatron's flags that the role does without, though the command line has them.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    megatron: list[FlagGroup] = field(default_factory=list[FlagGroup])
    without: set[str] = field(default_factory=set[str])

    def megatron_over(self, groups: Sequence[FlagGroup]) -> list[FlagGroup]:
        """The command line's Megatron flags as the role has them."""
        changed = {group.flag for group in self.megatron} | self.without
        return [*(group for group in groups if group.flag not in changed), *self.megatron]


def critic_config(config: Config) -> Config:
    """The configuration of the critic's processes, which is that of the actor's with other sections.

    Args:
        config: A configuration with a critic.
    """
    own = config.critic
    assert own is not None, "only a configuration with a critic has one of the critic"
    return replace(
        config,
        role="critic",
        critic=None,
        train=own.train,
        data=own.data,
        algorithm=own.algorithm,
        checkpoint=own.checkpoint,
        megatron=own.megatron,
    )


def read_roles(
    path: str | None, specs: Collection[FlagSpec], megatron: Collection[str], problems: list[str]
) -> dict[Role, RoleOverrides]:
    """Read the file; without one no role differs.

    Args:
        path: The YAML file.
        specs: Flags of ours.
        megatron: Megatron's flags.
        problems: Gets what is wrong with the file.

    Returns:
        The overrides of the roles that the file names.
    """
    if path is None:
        return {}
    where = f"--megatron-config-path {path}"
    found: dict[Role, RoleOverrides] = {}
    for position, item in enumerate(_items(path, where, problems)):
        role = _role(item, f"{where}: item {position}", problems)
        if role is None:
            continue
        if role in found:
            problems.append(f"{where}: two items for the role {role}; put their overrides into one")
            continue
        found[role] = _overrides(item, role, f"{where}: {role}", specs, megatron, problems)
    return found


def _items(path: str, where: str, problems: list[str]) -> Sequence[Any]:
    try:
        content = read_yaml(path, where)
    except ConfigError as error:
        problems += error.problems
        return ()
    items: Any = cast("dict[str, Any]", content).get("megatron") if isinstance(content, dict) else None
    if not isinstance(items, list):
        problems.append(
            f"{where}: needs a top-level 'megatron' list, as in "
            "{megatron: [{role: critic, overrides: {lr: 1e-5}}]}"
        )
        return ()
    return cast("list[Any]", items)


def _role(item: Any, where: str, problems: list[str]) -> Role | None:
    if not isinstance(item, dict):
        problems.append(f"{where}: must be a mapping with role and overrides, found {item!r}")
        return None
    entries = cast("dict[str, Any]", item)
    unknown = sorted(set(entries) - {"name", "role", "overrides", "args"})
    problems += [f"{where}: unknown key {key!r}; known are name, role and overrides" for key in unknown]
    role = entries.get("role")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role), ROLES, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; roles are {' and '.join(ROLES)}"
        problems.append(f"{where}: unknown role {role!r}{hint}")
        return None
    return role


def _overrides(
    item: Mapping[str, Any],
    role: Role,
    where: str,
    specs: Collection[FlagSpec],
    megatron: Collection[str],
    problems: list[str],
) -> RoleOverrides:
    result = RoleOverrides()
    if "overrides" in item and "args" in item:
        problems.append(f"{where}: args is another name of overrides; give one of them")
    content: Any = item.get("overrides", item.get("args")) or {}
    if not isinstance(content, dict):
        problems.append(f"{where}: overrides must be a mapping of names to values, found {content!r}")
        return result
    by_dest = {spec.dest: spec for spec in specs}
    for entry, value in cast("dict[Any, Any]", content).items():
        dest = str(entry).replace("-", "_")
        option = "--" + dest.replace("_", "-")
        if dest in _IGNORED:
            continue
        if dest in by_dest:
            spec = by_dest[dest]
            problem = None if _may_differ(spec, role) else f"{spec.name} concerns the whole run; give it as a flag"
            problem = problem or set_value(result.values, spec, _number(spec, value))
            problems += [] if problem is None else [f"{where}: {problem}"]
        elif option in megatron:
            group = megatron_group(option, value)
            result.megatron += group
            if not group:
                result.without.add(option)
        else:
            known = {*by_dest, *(name.removeprefix("--").replace("-", "_") for name in megatron)}
            near = difflib.get_close_matches(dest, known, n=2, cutoff=0.7)
            hint = f"did you mean {' or '.join(near)}?" if near else "see docs/flags.md for the flags that exist"
            problems.append(f"{where}: unknown name {entry}; {hint}")
    return result


def _may_differ(spec: FlagSpec, role: Role) -> bool:
    """Whether a role may have a value of its own: the rest is one decision for generation, data and both roles."""
    if spec.section == "train":
        return spec.dest not in _SHARED
    if spec.section == "algorithm":
        return spec.dest in _OF_CRITIC if role == "critic" else spec.dest not in _ONE_ESTIMATOR
    return spec.dest in _PER_ROLE.get(spec.section, ())


def _number(spec: FlagSpec, value: Any) -> Any:
    """YAML reads ``1e-5`` as text; a number's field takes it for what it is."""
    if isinstance(value, str) and spec.type in (int, float):
        try:
            return spec.type(value)
        except ValueError:
            return value
    return value
