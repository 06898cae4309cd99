"""From a command line to a ``Config``: split by family, read, resolve, check, report everything together.

Owns the order of these steps. The foreign families and the preflight checks are passed in, so that
nothing here imports Megatron, an engine or the data package. Tests hold that no problem hides another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slime.config.critic import role_config
from slime.config.custom_file import read_custom_file
from slime.config.draft import Draft, Surroundings
from slime.config.embedded_flags import check_embedded_flags
from slime.config.engine_families import RECORDED_ROUTER, RECORDED_SGLANG
from slime.config.engine_overrides import check_overrides
from slime.config.families import FlagFamily, MegatronConfig, MegatronContext, PrefixFamily, plain_json
from slime.config.flags import FlagSpec, flag_specs
from slime.config.roles import RoleConfig, RoleOverrides, critic_config, read_roles
from slime.config.rules import RULES
from slime.config.rules.availability import UNAVAILABLE_MODEL_FLAGS
from slime.config.rules.external import check_external_engines
from slime.config.rules.inputs import file_problem
from slime.config.rules.parallel import check_parallel
from slime.config.schema import SECTIONS, Config, all_flag_specs
from slime.config.sections import CheckpointConfig
from slime.config.sections.algorithm import CRITIC_ESTIMATORS
from slime.config.sglang_checks import check_sglang_flags
from slime.config.tokens import FlagGroup, group_tokens, read_values, unknown_flag
from slime.errors import ConfigError

Preflight = Callable[[Config], list[str]]
"""A check that other layers own: takes the configuration without Megatron's values, returns problems."""


class NamesAndParser(Protocol):
    """Flags of a user's own parser (``add_custom_arguments``)."""

    def flag_names(self) -> frozenset[str]:
        """Every accepted flag."""
        ...

    def parse(self, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Values by attribute name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """The foreign parsers of one command line."""

    megatron: FlagFamily | None
    sglang: PrefixFamily = RECORDED_SGLANG
    router: PrefixFamily = RECORDED_ROUTER
    custom: NamesAndParser | None = None


@dataclass(slots=True, kw_only=True)
class _Split:
    """Groups of one command line by family."""

    slime: list[FlagGroup]
    sglang: list[FlagGroup]
    router: list[FlagGroup]
    megatron: list[FlagGroup]
    custom: list[FlagGroup]


def parse(
    argv: Sequence[str],
    *,
    megatron: FlagFamily | None,
    sglang: PrefixFamily = RECORDED_SGLANG,
    router: PrefixFamily = RECORDED_ROUTER,
    custom: NamesAndParser | None = None,
    surroundings: Surroundings | None = None,
    preflights: Sequence[Preflight] = (),
) -> Config:
    """Parse and check a command line.

    Args:
        argv: Tokens without the program's name.
        megatron: Megatron's family; None leaves ``Config.megatron`` empty and refuses its flags.
        sglang: The engine's family.
        router: The router's family.
        custom: Flags of the user's own parser; their values reach plug-ins through ``args``.
        surroundings: The machine; by default one without CUDA devices and optional packages.
        preflights: Further checks on the resolved configuration, before Megatron's values are known.

    Raises:
        ConfigError: Every problem found, each naming the flag and the remedy.
    """
    families = Families(megatron=megatron, sglang=sglang, router=router, custom=custom)
    specs = {name: spec for spec in all_flag_specs() if spec.form != "none" for name in spec.names}
    groups, problems = group_tokens(argv)
    split, unknown = _split(groups, specs, families)
    values, given, wrong = read_values(split.slime, specs)
    problems += unknown + wrong
    extra = _apply_custom_file(values, specs, families, split, problems)
    roles = read_roles(
        values.get("megatron_config_path"),
        all_flag_specs(),
        families.megatron.flag_names() if families.megatron is not None else (),
        problems,
    )
    line = _TrainerLine(values, split.megatron, given | frozenset(values), surroundings or Surroundings())
    own_line = line.of(roles.get("actor"))
    draft = own_line.draft(problems)
    engine_values = _engine_values(families.sglang, split.sglang, specs, draft)
    router_values = _prefixed(families.router, split.router, specs, draft)
    if families.custom is not None:
        extra.update(_foreign(families.custom, split.custom, draft))
    config = _build(draft, engine_values, router_values, extra)
    for preflight in preflights:
        draft.problems += preflight(_readable(config))
    megatron_config = _megatron(draft, families.megatron, own_line.megatron)
    critic = _critic(draft, families, line, roles.get("critic"))
    notices = dict.fromkeys((*draft.notices, *megatron_config.notices))
    config = replace(config, megatron=megatron_config, critic=critic, notices=tuple(notices))
    if critic is not None and critic.train != draft.train:  # plug-ins of its own
        found = [problem for preflight in preflights for problem in preflight(critic_config(_readable(config)))]
        draft.problems += [f"critic: {problem}" for problem in found if problem not in draft.problems]
    if draft.problems:
        raise ConfigError(list(dict.fromkeys(draft.problems)))
    return config


@dataclass(frozen=True, slots=True)
class _TrainerLine:
    """What slime and Megatron are told on one command line."""

    values: Mapping[str, Any]
    megatron: Sequence[FlagGroup]
    given: frozenset[str]
    surroundings: Surroundings

    def of(self, overrides: RoleOverrides | None) -> _TrainerLine:
        """The line with a role's overrides."""
        if overrides is None:
            return self
        return replace(
            self,
            values={**self.values, **overrides.values},
            megatron=overrides.megatron_over(self.megatron),
            given=self.given | frozenset(overrides.values),
        )

    def draft(self, problems: Sequence[str] = ()) -> Draft:
        """Sections after all rules."""
        draft = Draft(
            surroundings=self.surroundings,
            given=self.given,
            megatron_flags=frozenset(group.flag for group in self.megatron),
            problems=list(problems),
        )
        _fill_sections(draft, self.values)
        for rule in RULES:
            rule(draft)
        return draft


def _critic(actor: Draft, families: Families, line: _TrainerLine, overrides: RoleOverrides | None) -> RoleConfig | None:
    """The critic's part of the configuration; its problems and notices join the actor's."""
    if actor.algorithm.advantage_estimator not in CRITIC_ESTIMATORS:
        if overrides is not None:
            actor.notices.append(
                "--megatron-config-path: the overrides of the critic have no effect without --advantage-estimator ppo"
            )
        return None
    if actor.debug.debug_rollout_only:
        return None
    overrides = overrides or RoleOverrides()
    checkpoint = {spec.dest for spec in flag_specs(CheckpointConfig, "checkpoint")} & set(overrides.values)
    own = {name: overrides.values[name] for name in checkpoint}
    others = {name: value for name, value in overrides.values.items() if name not in checkpoint}
    own_line = line.of(replace(overrides, values=others))
    draft = own_line.draft()
    megatron = _megatron(draft, families.megatron, own_line.megatron)
    config = role_config(draft, megatron, actor.checkpoint, own)
    actor.problems += [f"critic: {p}" for p in draft.problems if p not in actor.problems]
    notices = (*draft.notices, *megatron.notices)
    actor.notices += [f"critic: {n}" for n in notices if n not in actor.notices]
    return config


def _split(groups: Sequence[FlagGroup], specs: Mapping[str, FlagSpec], families: Families) -> tuple[_Split, list[str]]:
    megatron = families.megatron.flag_names() if families.megatron is not None else frozenset[str]()
    custom = families.custom.flag_names() if families.custom is not None else frozenset[str]()
    split = _Split(slime=[], sglang=[], router=[], megatron=[], custom=[])
    problems: list[str] = []
    for group in groups:
        if group.flag in specs:
            split.slime.append(group)
        elif group.flag in custom:
            split.custom.append(group)
        elif group.flag.startswith(families.sglang.prefix):
            split.sglang.append(group)
        elif group.flag.startswith(families.router.prefix):
            split.router.append(group)
        elif group.flag in megatron:
            split.megatron.append(group)
        elif group.flag in UNAVAILABLE_MODEL_FLAGS:
            problems.append(f"{group.flag} is part of the interface but not available in this version; leave it out")
        else:
            everything = {*specs, *custom, *megatron, *families.sglang.flag_names(), *families.router.flag_names()}
            problems.append(unknown_flag(group.flag, everything))
    return split, problems


def _apply_custom_file(
    values: dict[str, Any],
    specs: Mapping[str, FlagSpec],
    families: Families,
    split: _Split,
    problems: list[str],
) -> dict[str, Any]:
    """Set the entries of ``--custom-config-path`` over the command line; returns the user's own names."""
    path = values.get("custom_config_path")
    if path is None:
        return {}
    file = read_custom_file(
        path,
        specs.values(),
        megatron=families.megatron.flag_names() if families.megatron is not None else (),
        prefixes=(families.sglang.prefix, families.router.prefix),
        own=families.custom.flag_names() if families.custom is not None else (),
    )
    values.update(file.values)
    split.megatron += file.megatron
    problems += file.problems
    return file.extra


def _fill_sections(draft: Draft, values: Mapping[str, Any]) -> None:
    for name, section in SECTIONS.items():
        own = {f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values}
        setattr(draft, name, section(**own))


def _engine_values(
    family: PrefixFamily, groups: Sequence[FlagGroup], specs: Mapping[str, FlagSpec], draft: Draft
) -> dict[str, Any]:
    """Values of the engine's own flags, checked against everything else that is said of the engines."""
    values = _prefixed(family, groups, specs, draft)
    check_embedded_flags(draft, values)
    check_sglang_flags(draft, values)
    check_overrides(draft, family, values)
    check_external_engines(draft, values)
    return values


def _prefixed(
    family: PrefixFamily, groups: Sequence[FlagGroup], specs: Mapping[str, FlagSpec], draft: Draft
) -> dict[str, Any]:
    refused = family.refused()
    accepted: list[FlagGroup] = []
    for group in groups:
        if group.flag in refused:
            draft.problems.append(f"{group.flag} cannot be given: {refused[group.flag]}")
        else:
            accepted.append(group)
    if not accepted:
        return {}
    try:
        values = family.parse([group.tokens for group in accepted], known=family.flag_names() | set(specs))
        return plain_json(values, f"{family.prefix} value")
    except ConfigError as error:
        draft.problems += error.problems
    return {}


def _foreign(family: NamesAndParser, groups: Sequence[FlagGroup], draft: Draft) -> dict[str, Any]:
    try:
        return plain_json(family.parse([group.tokens for group in groups]), "custom flag")
    except (ConfigError, TypeError) as error:
        draft.problems += error.problems if isinstance(error, ConfigError) else [str(error)]
    return {}


def _megatron(draft: Draft, family: FlagFamily | None, groups: Sequence[FlagGroup]) -> MegatronConfig:
    """Let Megatron's family derive and check; without a usable model it only checks its flags.

    Loading Megatron takes seconds, so a command line that is already wrong and has none of its flags
    is answered without it.
    """
    if family is None or (draft.problems and not groups):
        return MegatronConfig()
    context = MegatronContext(
        hf=draft.hf,
        cluster=draft.cluster,
        train=draft.train,
        data=draft.data,
        rollout=draft.rollout,
        algorithm=draft.algorithm,
        checkpoint=draft.checkpoint,
    )
    try:
        config = family.parse([token for group in groups for token in group.tokens], context)
    except ConfigError as error:
        draft.problems += error.problems
        return MegatronConfig()
    check_parallel(draft, config)
    return config


def _build(
    draft: Draft,
    sglang: Mapping[str, Any],
    router: Mapping[str, Any],
    custom: Mapping[str, Any],
) -> Config:
    return Config(
        **{name: getattr(draft, name) for name in SECTIONS},
        sglang=sglang,
        router=router,
        custom=custom,
        hf=draft.hf,
        deployment=draft.deployment,
        external_engines=draft.external_engines,
        notices=tuple(dict.fromkeys(draft.notices)),
    )


def _readable(config: Config) -> Config:
    """The configuration without files that were already reported, so that preflights do not repeat it."""
    path = config.data.prompt_data
    if path is None or file_problem(path, "--prompt-data") is None:
        return config
    return replace(config, data=replace(config.data, prompt_data=None))
