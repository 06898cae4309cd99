"""Prompt data sets: positions of an epoch to samples, in memory or read as they are needed.

Owns the settings that lead from ``args`` to a data set. Leaves out the cursor that walks it, and
groups. Tests hold: reading with workers or lazily gives the samples of reading in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from slime.config.data_paths import parse_sliced_path
from slime.config.eval_datasets import EvalDatasetConfig
from slime.data.files import open_table, select_rows
from slime.data.rows import RowBuilder, RowStream
from slime.data.store import BadRowPolicy, MemoryStore, RowFaults, SampleStore, StreamStore
from slime.data.templates import PromptFormat, Tokenizer, count_prompt_tokens
from slime.errors import DataError
from slime.types import Group, Sample


class DatasetArgs(Protocol):
    """What a training data set reads from ``args``."""

    prompt_data: str | None
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    multimodal_keys: Mapping[str, Any] | None
    apply_chat_template: bool
    apply_chat_template_kwargs: Mapping[str, Any]
    rollout_max_prompt_len: int | None
    rollout_seed: int
    num_data_workers: int | None
    streaming_data: bool
    skip_bad_rows: bool
    max_bad_row_fraction: float


class EvalArgs(Protocol):
    """What an evaluation set reads from ``args`` besides its own settings."""

    eval_max_prompt_len: int | None
    num_data_workers: int | None
    skip_bad_rows: bool
    max_bad_row_fraction: float


class Dataset:
    """The prompts of one file (jsonl or parquet, ``path@[a:b]`` for a part of it).

    Args:
        path: File with optional slice suffix.
        tokenizer: For chat template and length filter; may be None when neither is used.
        processor: Multimodal processor or None; kept for callers, lengths are counted on text.
        max_length: Longest prompt in tokens; longer ones are left out.
        prompt_key: Prompt column.
        multimodal_keys: Kind of content -> column of its items.
        label_key: Label column.
        tool_key: Tools column.
        metadata_key: Metadata column.
        seed: Shuffling seed; the epoch is added to it.
        apply_chat_template: Render messages to text.
        apply_chat_template_kwargs: For every rendering.
        num_workers: Processes that render and tokenize; 0 in this one.
        streaming: Read rows when they are asked for. Positions of bad rows and over-long prompts
            then stay in the order and hold no sample.
        bad_rows: What to do with rows that cannot be read.
        flags: Names of the flags behind ``prompt_key``, ``label_key`` and ``max_length``.

    Raises:
        DataError: Unusable rows, a missing column, or nothing left.
        FileNotFoundError: No such file.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer | None,
        processor: Any | None = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "input",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        num_workers: int = 0,
        streaming: bool = False,
        bad_rows: BadRowPolicy | None = None,
        flags: tuple[str, str, str] = ("--input-key", "--label-key", "--rollout-max-prompt-len"),
    ) -> None:
        fmt = PromptFormat(
            input_key=prompt_key,
            label_key=label_key,
            metadata_key=metadata_key,
            tool_key=tool_key,
            multimodal_keys=multimodal_keys,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=dict(apply_chat_template_kwargs or {}),
            input_flag=flags[0],
            label_flag=flags[1],
        )
        self.path = path
        self.tokenizer = tokenizer
        self.processor = processor
        self.seed = seed
        self._sampler: Callable[[int], list[Group]] | None = None
        plain, part = parse_sliced_path(path)
        table = open_table(plain)
        rows = select_rows(len(table), part)
        faults = RowFaults(path, bad_rows or BadRowPolicy(), max_length, flags[2])
        stream = RowStream(table, RowBuilder(fmt=fmt, tokenizer=tokenizer, max_length=max_length), num_workers)
        self._store: SampleStore
        if streaming:
            self._store = StreamStore(table, rows, stream, faults)
        else:
            self._store = MemoryStore(path, rows, stream, faults)

    def __len__(self) -> int:
        """Positions of one epoch."""
        return len(self._store)

    @property
    def samples(self) -> list[Sample]:
        """All samples in the order of the current epoch; not available when streaming."""
        if isinstance(self._store, StreamStore):
            raise DataError("a streamed data set (--streaming-data) has no list of samples; iterate over positions")
        return [sample for position in range(len(self)) if (sample := self._store.at(position)) is not None]

    def at(self, position: int) -> Sample | None:
        """The sample at a position of the current epoch; None if that row is left out."""
        return self._store.at(position)

    def __getitem__(self, position: int) -> Sample | None:
        return self.at(position)

    def shuffle(self, epoch: int) -> None:
        """Order the data set for an epoch; the same epoch always gives the same order."""
        self._store.shuffle(self.seed, epoch)

    def attach_sampler(self, sampler: Callable[[int], list[Group]]) -> None:
        """Tell how ``sample`` draws; done by the data source that walks this set."""
        self._sampler = sampler

    def sample(self, num_samples: int) -> list[Group]:
        """The next ``num_samples`` prompts as groups, from the cursor of the owning data source."""
        if self._sampler is None:
            raise DataError("Dataset.sample draws for a data source; this data set belongs to none")
        return self._sampler(num_samples)

    def close(self) -> None:
        """End worker processes, if any."""
        self._store.close()


def load_train_dataset(args: DatasetArgs, tokenizer: Tokenizer | None, processor: Any | None = None) -> Dataset:
    """The data set behind ``--prompt-data``."""
    if args.prompt_data is None:
        raise DataError(
            "no prompts: give --prompt-data FILE, or --disable-rollout-global-dataset with a --data-source-path"
        )
    return Dataset(
        args.prompt_data,
        tokenizer,
        processor,
        args.rollout_max_prompt_len,
        prompt_key=args.input_key,
        multimodal_keys=args.multimodal_keys,
        label_key=args.label_key,
        tool_key=args.tool_key,
        metadata_key=args.metadata_key,
        seed=args.rollout_seed,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        num_workers=args.num_data_workers or 0,
        streaming=args.streaming_data,
        bad_rows=BadRowPolicy(skip=args.skip_bad_rows, max_fraction=args.max_bad_row_fraction),
    )


def load_eval_dataset(
    args: EvalArgs, config: EvalDatasetConfig, tokenizer: Tokenizer | None, processor: Any | None = None
) -> Dataset:
    """One evaluation set, always in memory; prompts longer than ``--eval-max-prompt-len`` are left out."""
    return Dataset(
        config.path,
        tokenizer,
        processor,
        args.eval_max_prompt_len,
        prompt_key=config.input_key or "input",
        multimodal_keys=config.multimodal_keys,
        label_key=config.label_key,
        tool_key=config.tool_key,
        metadata_key=config.metadata_key,
        apply_chat_template=config.apply_chat_template,
        apply_chat_template_kwargs=config.apply_chat_template_kwargs,
        num_workers=args.num_data_workers or 0,
        bad_rows=BadRowPolicy(skip=args.skip_bad_rows, max_fraction=args.max_bad_row_fraction),
        flags=("--input-key or --eval-input-key", "--label-key or --eval-label-key", "--eval-max-prompt-len"),
    )


def filter_long_prompt(
    samples: Sequence[Sample], tokenizer: Tokenizer, processor: Any | None, max_length: int | None
) -> list[Sample]:
    """Samples whose prompt has at most ``max_length`` tokens, in order; all of them without a limit."""
    del processor  # lengths are counted on text
    if max_length is None:
        return list(samples)
    return [
        s
        for s in samples
        if count_prompt_tokens(s.prompt, tokenizer, s.metadata, s.apply_chat_template_kwargs) <= max_length
    ]


def get_source(sample: Sample) -> str:
    """Where a sample came from: attribute ``source``, else ``metadata["source_name"]``, else "unknown"."""
    own = cast(Any, vars(sample).get("source"))
    return str(own or sample.metadata.get("source_name") or "unknown")
