"""``args``: the flat, read-only view of a ``Config`` that plug-ins receive.

Every flag appears under its established attribute name; Megatron's values, the engine's as
``sglang_*``, the router's as ``router_*``, entries of ``--custom-config-path``, and facts that only
exist at run time, such as the router's address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.engine_flags import SGLANG_ALIASES, SGLANG_DEFAULTS
from slime.config.router_flags import ROUTER_DEFAULTS
from slime.config.schema import SECTIONS, Config
from slime.config.sections.algorithm import CRITIC_ESTIMATORS


class ArgsView:
    """Flat attributes over a ``Config``.

    Later entries win: engine and router defaults, Megatron's values, the sections, names from
    ``--custom-config-path`` that no flag has, run-time facts.

    Args:
        config: The resolved configuration.
        facts: Run-time facts; use ``with_facts``.
    """

    __slots__ = ("_config", "_facts", "_values")

    _config: Config
    _facts: dict[str, Any]
    _values: dict[str, Any]

    def __init__(self, config: Config, facts: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_facts", dict(facts or {}))
        object.__setattr__(self, "_values", {**_flatten(config), **self._facts})

    @property
    def config(self) -> Config:
        """The typed configuration behind this view."""
        return self._config

    def with_facts(self, **facts: Any) -> ArgsView:
        """A new view that also knows ``facts``; each fact is set once.

        Raises:
            ValueError: A fact is already known.
        """
        known = sorted(set(facts) & set(self._facts))
        if known:
            raise ValueError(f"run-time fact {known[0]} is already set to {self._facts[known[0]]!r}")
        return ArgsView(self._config, {**self._facts, **facts})

    def to_dict(self) -> dict[str, Any]:
        """A copy of all attributes."""
        return dict(self._values)

    def __getattr__(self, name: str) -> Any:
        # Dunder probes (copy, pickle) arrive before the slots are filled.
        if name.startswith("__") or name in ArgsView.__slots__:
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"args has no {name!r}: no flag, no Megatron value and no entry of --custom-config-path has that name"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args is read-only, cannot set {name!r}; put values of your own in --custom-config-path")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"args is read-only, cannot delete {name!r}")

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._values]

    def __reduce__(self) -> tuple[Any, ...]:
        return ArgsView, (self._config, self._facts)

    def __repr__(self) -> str:
        return f"ArgsView({len(self._values)} values)"


def _flatten(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = {f"sglang_{name}": default for name, default in SGLANG_DEFAULTS.items()}
    values.update({f"router_{name}": default for name, default in ROUTER_DEFAULTS.items()})
    values.update(config.megatron.values)
    values.update({f"sglang_{name}": value for name, value in config.sglang.items()})
    values.update({f"sglang_{alias}": values[f"sglang_{name}"] for alias, name in SGLANG_ALIASES.items()})
    values.update({f"router_{name}": value for name, value in config.router.items()})
    for section_name, section in SECTIONS.items():
        values.update({name: getattr(getattr(config, section_name), name) for name in section.__dataclass_fields__})
    values.update(
        world_size=config.cluster.world_size,
        rollout_num_engines=config.num_engines,
        rollout_external=config.rollout.rollout_external_engine_addrs is not None,
        use_critic=config.algorithm.advantage_estimator in CRITIC_ESTIMATORS,
        role=config.role,
        bf16=config.train.precision == "bf16",
        fp16=config.train.precision == "fp16",
    )
    values.update(config.custom)
    return values
