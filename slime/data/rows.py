"""Rows to prompt samples: one row at a time, or a stream of them over worker processes, in order.

Owns which rows are bad and which prompts are too long. Tests hold: the stream is the same for any
number of workers; an over-long prompt is dropped, a bad row is reported with its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from slime.data.files import Row, RowTable
from slime.data.templates import (
    PromptFormat,
    Tokenizer,
    check_columns,
    count_prompt_tokens,
    read_metadata,
    read_prompt,
    read_tools,
    render_prompt,
)
from slime.errors import DataError
from slime.types import Sample
from slime.worker_process import WorkerPool

CHUNK_ROWS = 128
"""Rows per message to a worker process."""

_CHUNK_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class TooLong:
    """A prompt above the length limit."""

    num_tokens: int


Built = Sample | TooLong | DataError
"""What a row became; a DataError is a value here, so that the reader decides whether it stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuilder:
    """Turns rows into samples.

    Args:
        fmt: Columns and rendering.
        tokenizer: Needed for a template or a length limit.
        max_length: Longest prompt in tokens; None for no limit.
    """

    fmt: PromptFormat
    tokenizer: Tokenizer | None
    max_length: int | None

    def build(self, row: Row | DataError, location: str) -> Built:
        """The sample of one row, with the chat template applied if asked for; faults pass through."""
        if isinstance(row, DataError):
            return row
        try:
            return self._build(row, location)
        except DataError as error:
            return error

    def _build(self, row: Row, location: str) -> Sample | TooLong:
        fmt = self.fmt
        check_columns(row, fmt, location)
        metadata = read_metadata(row, fmt.metadata_key, location)
        tools = read_tools(row, fmt.tool_key, location)
        if tools is not None:
            metadata["tools"] = tools
        prompt, multimodal_inputs = read_prompt(row, fmt, location)
        own: Any = row.get("apply_chat_template_kwargs") or {}
        if not isinstance(own, dict):
            raise DataError(
                f"{location}: column apply_chat_template_kwargs must be an object, found {type(own).__name__}"
            )
        kwargs = {**fmt.apply_chat_template_kwargs, **cast(dict[str, Any], own)}
        if fmt.apply_chat_template and not isinstance(prompt, str):
            prompt = self._render(prompt, tools, kwargs, location)
        if self.max_length is not None:
            if self.tokenizer is None:
                raise DataError("a prompt length limit needs a tokenizer (--hf-checkpoint)")
            num_tokens = count_prompt_tokens(prompt, self.tokenizer, metadata, kwargs)
            if num_tokens > self.max_length:
                return TooLong(num_tokens)
        label = row[fmt.label_key] if fmt.label_key is not None else None
        return Sample(
            prompt=prompt,
            label=label,
            metadata=metadata,
            multimodal_inputs=multimodal_inputs,
            apply_chat_template_kwargs=kwargs,
        )

    def _render(self, messages: list[Any], tools: list[Any] | None, kwargs: dict[str, Any], location: str) -> str:
        if self.tokenizer is None:
            raise DataError("--apply-chat-template needs a tokenizer (--hf-checkpoint)")
        try:
            return render_prompt(messages, self.tokenizer, tools, kwargs)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{location}: the chat template refused the prompt: {error}") from error


class ChunkBuilder:
    """A row builder as worker processes call it."""

    def __init__(self, builder: RowBuilder) -> None:
        self._builder = builder

    def __call__(self, rows: Sequence[tuple[Row | DataError, str]]) -> list[Built]:
        """Build several rows."""
        return [self._builder.build(row, location) for row, location in rows]


class RowStream:
    """Builds chosen rows of a table in order, in this process or ahead of the reader in workers.

    Args:
        table: The file.
        builder: Rows to samples.
        num_workers: Child processes; 0 builds here.
    """

    def __init__(self, table: RowTable, builder: RowBuilder, num_workers: int) -> None:
        self._table = table
        self._builder = builder
        self._num_workers = num_workers
        self._pool: WorkerPool | None = None

    def build(self, indices: Iterable[int]) -> Iterator[Built]:
        """Yield what each row of ``indices`` became, in that order."""
        if self._num_workers == 0:
            return (self._builder.build(*self._decode(index)) for index in indices)
        return self._build_in_workers(iter(indices))

    def _decode(self, index: int) -> tuple[Row | DataError, str]:
        location = self._table.location(index)
        try:
            return self._table.row(index), location
        except DataError as error:
            return error, location

    def _build_in_workers(self, indices: Iterator[int]) -> Iterator[Built]:
        if self._pool is None:
            self._pool = WorkerPool("data", self._num_workers)
        ahead: deque[Future[list[Built]]] = deque()
        try:
            while True:
                while len(ahead) < 2 * self._num_workers and (chunk := list(islice(indices, CHUNK_ROWS))):
                    rows = [self._decode(index) for index in chunk]
                    ahead.append(
                        self._pool.submit(
                            "slime.data.rows:ChunkBuilder",
                            (rows,),
                            timeout_seconds=_CHUNK_TIMEOUT_SECONDS,
                            factory_args=(self._builder,),
                        )
                    )
                if not ahead:
                    return
                yield from ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
