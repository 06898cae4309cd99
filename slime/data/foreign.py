"""Building the data source a user names, whatever part of the interface their class has."""

from __future__ import annotations

import inspect
import logging
from typing import Any, cast

from slime.data.source import DataSource, RolloutDataSource
from slime.errors import PluginError
from slime.plugins import load_plugin
from slime.types import Group

logger = logging.getLogger(__name__)


def build_data_source(args: Any) -> Any:
    """Build the class behind ``--data-source-path``.

    A class whose ``__init__`` takes no arguments, as in a subclass that only sets up a buffer, is
    completed with what ``RolloutDataSource`` sets up from ``args``.

    Raises:
        PluginError: Not a class with ``get_samples`` and ``add_samples``.
    """
    path = args.data_source_path
    cls = load_plugin(path, flag="--data-source-path", kind="other")
    missing = [name for name in ("get_samples", "add_samples") if not callable(getattr(cls, name, None))]
    if not inspect.isclass(cls) or missing:
        raise PluginError(
            f"--data-source-path {path}: must be a class built as cls(args) with get_samples(num_samples) and "
            f"add_samples(groups); missing: {', '.join(missing) or 'it is not a class'}"
        )
    if issubclass(cls, RolloutDataSource) and not inspect.signature(cls.__init__).parameters.keys() - {"self"}:
        source = cast(Any, cls).__new__(cls)
        RolloutDataSource.__init__(source, args)
        cast(Any, cls).__init__(source)
        return source
    source = cast(Any, cls)(args)
    return source if isinstance(source, DataSource) else ForeignDataSource(source)


class ForeignDataSource(DataSource):
    """A user's object that only has some of the methods; everything else is looked up on it."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # asked for by copy and pickle before it is set
            raise AttributeError(name)
        return getattr(self._source, name)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Ask the user's object."""
        return self._source.get_samples(num_samples)

    def add_samples(self, samples: list[Group]) -> None:
        """Hand back to the user's object."""
        self._source.add_samples(samples)

    def save(self, rollout_id: int) -> None:
        """Save the user's object if it can be."""
        self._optional("save", rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Load the user's object if it can be."""
        self._optional("load", rollout_id)

    def __len__(self) -> int:
        """Its length, 0 if it has none."""
        return len(self._source) if callable(getattr(self._source, "__len__", None)) else 0

    def snapshot(self, rollout_id: int) -> None:
        """Tell the user's object if it wants to know."""
        if callable(getattr(self._source, "snapshot", None)):
            self._source.snapshot(rollout_id)

    def _optional(self, name: str, rollout_id: int | None) -> None:
        method = getattr(self._source, name, None)
        if callable(method):
            method(rollout_id)
        else:
            logger.warning("%s has no %s(rollout_id): a resumed run starts it anew", type(self._source).__name__, name)
