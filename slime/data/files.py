"""Prompt files: rows of a jsonl or parquet file by number, with a place to point at when one is bad.

Owns the byte-offset index of jsonl files and row-group access to parquet
files. Nothing here knows what a column means. Tests hold: row ``i`` of a lazily opened table is row
``i`` of the file read in order; every fault names file and line.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

from slime.config.data_paths import DATA_SUFFIXES, parse_sliced_path
from slime.errors import DataError

Row = dict[str, Any]


class RowTable(Protocol):
    """Rows of one file by number. ``shards`` are runs of row numbers that are cheap to read together."""

    @property
    def shards(self) -> list[range]:
        """Consecutive ranges of row numbers that cover the table."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row ``index``. Raises DataError if it cannot be decoded."""
        ...

    def location(self, index: int) -> str:
        """Where row ``index`` is, for messages: ``file:line``."""
        ...


class JsonlTable:
    """A jsonl file, indexed once by byte offset (16 bytes of memory per row), read on demand.

    Blank lines are no rows.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._offsets = array("q")
        self._lines = array("q")
        self._file = Path(path).open("rb")  # noqa: SIM115 - rows are read for as long as the table lives
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if not line.isspace():
                self._offsets.append(offset)
                self._lines.append(number)
            offset += len(line)

    @property
    def shards(self) -> list[range]:
        """The whole file: any line is one seek away."""
        return [range(len(self))]

    def __len__(self) -> int:
        return len(self._offsets)

    def location(self, index: int) -> str:
        """``file:line``, lines counted from 1."""
        return f"{self._path}:{self._lines[index]}"

    def row(self, index: int) -> Row:
        """Decode one line."""
        self._file.seek(self._offsets[index])
        return decode_json_row(self._file.readline(), self.location(index))


class ParquetTable:
    """A parquet file; one row group is decoded at a time and kept until another is needed."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq  # 0.4 s that jsonl users need not pay

        self._path = path
        self._file: Any = pq.ParquetFile(path)
        self._starts: list[int] = [0]
        for group in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + int(self._file.metadata.row_group(group).num_rows))
        self._loaded = -1
        self._table: Any = None

    @property
    def shards(self) -> list[range]:
        """One range per row group."""
        return [range(a, b) for a, b in zip(self._starts[:-1], self._starts[1:], strict=True) if a < b]

    def __len__(self) -> int:
        return self._starts[-1]

    def location(self, index: int) -> str:
        """``file, row n``, rows counted from 1."""
        return f"{self._path}, row {index + 1}"

    def row(self, index: int) -> Row:
        """Decode one row, loading its row group if another one is held."""
        group = bisect_right(self._starts, index) - 1
        if group != self._loaded:
            self._table, self._loaded = self._file.read_row_group(group), group
        local = index - self._starts[group]
        return cast(Row, self._table.slice(local, 1).to_pylist()[0])


def decode_json_row(line: bytes | str, location: str) -> Row:
    """Parse one jsonl line into a mapping.

    Raises:
        DataError: It is not JSON, or not an object.
    """
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        shown = line[:80].decode("utf-8", "replace") if isinstance(line, bytes) else line[:80]
        raise DataError(f"{location}: not a JSON object: {error}; the line starts {shown.strip()!r}") from None
    if not isinstance(row, dict):
        raise DataError(f"{location}: a row must be a JSON object like {{...}}, found {type(row).__name__}")
    return cast(Row, row)


def open_table(path: str) -> RowTable:
    """Open a prompt file by its extension.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The extension is neither .jsonl nor .parquet.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"prompt file not found: {path}")
    extension = Path(path).suffix
    if extension == ".jsonl":
        return JsonlTable(path)
    if extension == ".parquet":
        return ParquetTable(path)
    raise DataError(f"{path}: unsupported file type {extension!r}; accepted are {' and '.join(DATA_SUFFIXES)}")


def select_rows(num_rows: int, part: slice) -> range:
    """Row numbers that a slice leaves of ``num_rows``."""
    return range(*part.indices(num_rows))


def read_file(path: str) -> Iterator[Row]:
    """Yield the rows of ``path``, ``path@[a:b]`` included, in order.

    Raises:
        DataError: A row cannot be decoded.
    """
    plain, part = parse_sliced_path(path)
    table = open_table(plain)
    for index in select_rows(len(table), part):
        yield table.row(index)


def head_rows(path: str) -> Iterator[tuple[Row | DataError, str]]:
    """Rows from the start of a file with their places, without indexing all of it; bad ones as errors."""
    if Path(path).suffix == ".parquet":
        table = open_table(path)
        for index in range(len(table)):
            yield table.row(index), table.location(index)
        return
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            location = f"{path}:{number}"
            try:
                yield decode_json_row(line, location), location
            except DataError as error:
                yield error, location
