"""The exception tree: one name per kind of failure a user or operator can act on.

Every class is also the matching builtin, so code written against ``ValueError`` or
``TimeoutError`` keeps working. A message says what was found, what is accepted and what to
change. ``assert`` is left for invariants that only our own fault can break.
"""

from collections.abc import Sequence


class SlimeError(Exception):
    """Base of every error that slime raises on purpose."""


class ConfigError(SlimeError, ValueError):
    """The command line, a configuration file or a combination of flags is wrong.

    Args:
        problems: One sentence per fault, each naming the flag and the remedy. All faults of
            one command line are reported together.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(SlimeError, ValueError):
    """A prompt file, a row or a checkpoint of the data source cannot be used as it is."""


class PluginError(SlimeError, TypeError):
    """A user's function or class cannot be loaded, or does not have the expected signature."""


class EngineError(SlimeError, RuntimeError):
    """An inference engine or the router failed, or answered something unusable."""


class WeightSyncError(EngineError):
    """The weights in an engine are not those of the trainer."""


class TrainerError(SlimeError, RuntimeError):
    """A training process failed, or produced numbers that must not be trained on."""


class CheckpointError(SlimeError, RuntimeError):
    """A checkpoint is missing, unfinished, or does not fit the model."""


class WaitTimeoutError(SlimeError, TimeoutError):
    """A bounded wait expired. The message says which process waited for what, and how long."""
