"""Data sources: where the groups of a rollout come from, and how a resumed run continues exactly.

Owns the cursor over the prompts, the buffer of returned groups and their checkpoint. Leaves out
reading and rendering. Tests hold: a source that is saved and loaded gives the groups the first one
would have given, whatever was prefetched after the saved rollout.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from slime.data.dataset import Dataset, DatasetArgs, load_train_dataset
from slime.data.templates import load_processor, load_tokenizer
from slime.errors import DataError, PluginError
from slime.files import write_atomically
from slime.plugins import load_plugin
from slime.types import Group, Sample

logger = logging.getLogger(__name__)

DEFAULT_BUFFER_FILTER = "slime.rollout.data_source.pop_first"
_CURSOR_KEYS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index")
_SNAPSHOTS_BEYOND_QUEUE = 3  # the rollout in training, the one being generated, and the last trained one


class SourceArgs(DatasetArgs, Protocol):
    """What a data source reads from ``args``."""

    rollout_global_dataset: bool
    rollout_shuffle: bool
    n_samples_per_prompt: int
    hf_checkpoint: str | None
    buffer_filter_path: str | None
    async_buffer_size: int
    save: str | None
    load: str | None


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Remove and return the first ``num_samples`` groups of the buffer, or as many as there are."""
    del args, rollout_id
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class DataSource(ABC):
    """What the rollout takes groups from."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """The next ``num_samples`` groups, each with ``n_samples_per_prompt`` samples."""

    @abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back for a later rollout."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the state as it was when ``rollout_id`` had been generated."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Continue after ``rollout_id``."""

    @abstractmethod
    def __len__(self) -> int:
        """Prompts in one epoch."""

    def snapshot(self, rollout_id: int) -> None:
        """Remember the state after rollout ``rollout_id`` for a later ``save(rollout_id)``.

        Called when a rollout is complete and its leftovers have been returned. One rollout runs at
        a time, so nothing else is on its way then.
        """
        del rollout_id


class RolloutDataSource(DataSource):
    """Prompts of ``--prompt-data``, epoch after epoch. Returned groups are not kept.

    A subclass may override ``get_samples`` (``self.dataset.sample(n)`` draws from the cursor) or
    ``buffer_filter``; a ``buffer`` that a subclass fills is drained first and is part of the state.
    """

    dataset: Dataset | None

    def __init__(self, args: SourceArgs) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.buffer: list[Group] = []
        self._snapshots: dict[int, dict[str, Any]] = {}
        self._filter: Callable[..., Any] = self.buffer_filter
        if args.buffer_filter_path is not None and args.buffer_filter_path != DEFAULT_BUFFER_FILTER:
            self._filter = load_plugin(args.buffer_filter_path, flag="--buffer-filter-path", kind="other")
        self.dataset = self._load_dataset()

    def _load_dataset(self) -> Dataset | None:
        args = self.args
        if not args.rollout_global_dataset:
            return None
        tokenizer = load_tokenizer(args.hf_checkpoint) if args.hf_checkpoint else None
        processor = load_processor(args.hf_checkpoint) if args.hf_checkpoint and args.multimodal_keys else None
        dataset = load_train_dataset(args, tokenizer, processor)
        dataset.attach_sampler(self._draw_groups)
        if args.rollout_shuffle:
            dataset.shuffle(self.epoch_id)
        return dataset

    def buffer_filter(self, args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
        """Choose and remove groups of the buffer; subclasses may leave out ``rollout_id``."""
        return pop_first(args, rollout_id, buffer, num_samples)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Groups from the buffer first, then from the prompts, over as many epochs as it takes."""
        groups = self._drain_buffer(num_samples)
        return groups + self._draw_groups(num_samples - len(groups))

    def add_samples(self, samples: list[Group]) -> None:
        """Ignore the groups: this source only reads."""
        logger.warning(
            "%s keeps no returned groups; %d dropped. Use RolloutDataSourceWithBuffer to keep them",
            type(self).__name__,
            len(samples),
        )

    def _drain_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer or num_samples == 0:
            return []
        if _takes_rollout_id(self._filter):
            chosen = self._filter(self.args, None, self.buffer, num_samples)
        else:
            chosen = self._filter(self.args, self.buffer, num_samples)
        groups = cast(list[Group], chosen)
        if not isinstance(chosen, list) or len(groups) > num_samples:
            raise PluginError(
                f"the buffer filter (--buffer-filter-path) must return a list of at most {num_samples} groups, "
                f"found {f'{len(groups)} groups' if isinstance(chosen, list) else type(chosen).__name__}"
            )
        # A filter that only selects would hand out the same groups for ever.
        taken = {id(group) for group in groups}
        self.buffer[:] = [group for group in self.buffer if id(group) not in taken]
        return groups

    def _draw_groups(self, num_groups: int) -> list[Group]:
        return [self._make_group(self._next_prompt()) for _ in range(num_groups)]

    def _next_prompt(self) -> Sample:
        """The prompt at the cursor, which moves past it, into the next epoch if need be."""
        if self.dataset is None:
            return Sample()
        while True:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
            prompt = self.dataset.at(self.sample_offset)
            self.sample_offset += 1
            if prompt is not None:
                return prompt

    def _make_group(self, prompt: Sample) -> Group:
        group: Group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            group.append(sample)
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {key: getattr(self, key) for key in _CURSOR_KEYS}
        # Samples of the buffer are generated into once they leave it, so the state holds copies.
        state["metadata"] = copy.deepcopy(self.metadata)
        state["buffer"] = [[sample.to_dict() for sample in copy.deepcopy(group)] for group in self.buffer]
        state["num_prompts"] = len(self)
        return state

    def snapshot(self, rollout_id: int) -> None:
        """Remember the state after a rollout; only as many are kept as rollouts can be ahead of training."""
        self._snapshots[rollout_id] = self._state()
        for old in sorted(self._snapshots)[: -(self.args.async_buffer_size + _SNAPSHOTS_BEYOND_QUEUE)]:
            del self._snapshots[old]

    def state_for(self, rollout_id: int) -> dict[str, Any]:
        """State after ``rollout_id``: its snapshot, or the state of now if none was taken."""
        if rollout_id in self._snapshots:
            return self._snapshots[rollout_id]
        if self._snapshots:
            logger.warning("no snapshot of the data source after rollout %d; its present state is used", rollout_id)
        return self._state()

    def save(self, rollout_id: int) -> None:
        """Write the state after ``rollout_id`` below ``--save``."""
        if not self.args.rollout_global_dataset:
            return
        if self.args.save is None:
            raise DataError("the data source cannot be saved without --save DIR")
        state = self.state_for(rollout_id)
        write_atomically(state_path(self.args.save, rollout_id), lambda path: torch.save(state, path))

    def load(self, rollout_id: int | None = None) -> None:
        """Continue after ``rollout_id`` from ``--load``; a missing file leaves the source at its start.

        Raises:
            DataError: The file is there but cannot be used.
        """
        if not self.args.rollout_global_dataset or self.args.load is None or rollout_id is None:
            return
        path = state_path(self.args.load, rollout_id)
        if not path.exists():
            if rollout_id >= 0:
                logger.warning("no data source state at %s; prompts start from the beginning", path)
            return
        try:
            # Holds samples with numpy columns and metadata of any type; it is our own file.
            state: dict[str, Any] = torch.load(path, weights_only=False)
            for key in _CURSOR_KEYS:
                setattr(self, key, int(state[key]))
            self.metadata = dict(state.get("metadata") or {})
            self.buffer = [[Sample.from_dict(sample) for sample in group] for group in state.get("buffer", [])]
        except (KeyError, TypeError, ValueError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise DataError(f"{path}: not a usable data source state ({error!r}); remove it to start afresh") from error
        if state.get("num_prompts", len(self)) != len(self):
            logger.warning(
                "%s was saved with %d prompts, --prompt-data now has %d; the order of prompts changes",
                path,
                state["num_prompts"],
                len(self),
            )
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)
        logger.info("data source continues in epoch %d at prompt %d", self.epoch_id, self.sample_offset)

    def __len__(self) -> int:
        """Prompts in one epoch; 0 without a data set."""
        return len(self.dataset) if self.dataset is not None else 0


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Prompts plus a buffer of returned groups, which are handed out first."""

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups at the end of the buffer.

        Raises:
            DataError: Not a list of groups of ``n_samples_per_prompt`` samples.
        """
        expected = self.args.n_samples_per_prompt
        for group in samples:
            if not isinstance(cast(Any, group), list) or len(group) != expected:
                found = f"{len(group)} samples" if isinstance(cast(Any, group), list) else type(group).__name__
                raise DataError(
                    f"add_samples takes groups (lists) of {expected} samples (--n-samples-per-prompt), found {found}"
                )
        self.buffer.extend(samples)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Merge entries into the metadata that is saved with the source."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """The metadata that is saved with the source."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Groups in the buffer."""
        return len(self.buffer)


def state_path(folder: str, rollout_id: int) -> Path:
    """File of the state after ``rollout_id`` below a checkpoint folder."""
    return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def _takes_rollout_id(function: Callable[..., Any]) -> bool:
    """Whether a buffer filter has the form (args, rollout_id, buffer, num_samples)."""
    parameters = inspect.signature(function).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    has_varargs = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
    return "rollout_id" in parameters or len(positional) >= 4 or has_varargs
