"""Settle where a run starts, as the command line does it, for tests that build a configuration by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime.config import Config
from slime.config.draft import Draft, Surroundings
from slime.config.rules.checkpoints import resolve_checkpoints
from slime.errors import ConfigError


def with_start_settled(config: Config, megatron_argv: Sequence[str] = ()) -> Config:
    """The configuration after the checkpoint rules.

    Args:
        config: Its ``checkpoint`` section holds what the user gave.
        megatron_argv: Megatron's tokens, for ``--finetune``.

    Raises:
        ConfigError: What the command line would be refused for.
    """
    draft = Draft(
        surroundings=Surroundings(),
        checkpoint=config.checkpoint,
        rollout=config.rollout,
        algorithm=config.algorithm,
        megatron_flags=frozenset(token for token in megatron_argv if token.startswith("--")),
    )
    resolve_checkpoints(draft)
    if draft.problems:
        raise ConfigError(draft.problems)
    return replace(config, checkpoint=draft.checkpoint)
