"""Where the samples of a data set live: all in memory, or built as they are read.

Owns order (shuffling by seed and epoch) and the limits on bad rows and over-long prompts. Tests hold:
shuffling is a permutation of the original order that depends on seed and epoch only; a lazily read
store holds the samples of one in memory.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tqdm import tqdm

from slime.data.files import RowTable
from slime.data.rows import Built, RowStream, TooLong
from slime.errors import DataError
from slime.types import Sample

logger = logging.getLogger(__name__)

_PROGRESS_DELAY_SECONDS = 3.0
_SHOWN_FAULTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRowPolicy:
    """What to do with rows that cannot be read: stop at the first, or skip up to a share of all."""

    skip: bool = False
    max_fraction: float = 0.0


class RowFaults:
    """Counts bad rows and over-long prompts of one file, and stops when a limit is passed."""

    def __init__(self, path: str, policy: BadRowPolicy, max_length: int | None, max_length_flag: str) -> None:
        self._path = path
        self._policy = policy
        self._max_length = max_length
        self._max_length_flag = max_length_flag
        self._bad: dict[int, str] = {}
        self._too_long: set[int] = set()

    def admit(self, index: int, built: Built) -> Sample | None:
        """The sample of row ``index``; None if the row is skipped. Raises DataError if it may not be."""
        if isinstance(built, Sample):
            return built
        if isinstance(built, TooLong):
            self._too_long.add(index)
            return None
        if not self._policy.skip:
            raise built
        if index not in self._bad:
            self._bad[index] = str(built)
            if len(self._bad) <= _SHOWN_FAULTS:
                logger.warning("skipped a bad row: %s", built)
        return None

    def check_share(self, num_rows: int) -> None:
        """Raise DataError when more than the allowed share of ``num_rows`` is bad."""
        limit = self._policy.max_fraction
        if len(self._bad) > limit * num_rows:
            first = "; ".join(list(self._bad.values())[:_SHOWN_FAULTS])
            raise DataError(
                f"{self._path}: {len(self._bad)} of {num_rows} rows are bad, more than "
                f"--max-bad-row-fraction {limit:g} allows with --skip-bad-rows. First ones: {first}"
            )

    def summarize(self, num_rows: int) -> None:
        """Log what was left out; raise DataError if that is everything."""
        if num_rows == 0:
            raise DataError(f"{self._path}: no rows; check the file and its slice suffix")
        if len(self._bad) + len(self._too_long) == num_rows:
            raise DataError(self.nothing_left())
        if self._bad or self._too_long:
            logger.info(
                "%s: %d rows, skipped %d bad rows and %d prompts longer than %s tokens",
                self._path,
                num_rows,
                len(self._bad),
                len(self._too_long),
                self._max_length,
            )

    def nothing_left(self) -> str:
        """The message for a file without a usable row."""
        return (
            f"{self._path}: nothing left after filtering {len(self._too_long)} prompts longer than "
            f"{self._max_length} tokens ({self._max_length_flag}) and {len(self._bad)} bad rows"
        )


def epoch_order(seed: int, epoch: int, size: int) -> array[int]:
    """The permutation of ``range(size)`` of one epoch."""
    order = array("q", range(size))
    random.Random(seed + epoch).shuffle(order)
    return order


def shard_order(seed: int, epoch: int, shards: Sequence[range]) -> array[int]:
    """Row numbers with the shards in random order and the rows random within each of them.

    With one shard this is ``epoch_order``.
    """
    if len(shards) == 1:
        return array("q", (shards[0][i] for i in epoch_order(seed, epoch, len(shards[0]))))
    order: array[int] = array("q")
    for number in epoch_order(seed, epoch, len(shards)):
        shard = list(shards[number])
        random.Random(f"{seed + epoch}/{number}").shuffle(shard)
        order.extend(shard)
    return order


class SampleStore(Protocol):
    """Samples by position in the current epoch."""

    def __len__(self) -> int: ...

    def at(self, position: int) -> Sample | None:
        """The sample at a position; None where the row is left out."""
        ...

    def shuffle(self, seed: int, epoch: int) -> None:
        """Order the positions for an epoch."""
        ...

    def close(self) -> None:
        """Release files and processes."""
        ...


class MemoryStore:
    """Every usable sample of the file, built once."""

    def __init__(self, path: str, rows: range, stream: RowStream, faults: RowFaults) -> None:
        self._samples: list[Sample] = []
        progress = tqdm(total=len(rows), desc=f"reading {path}", delay=_PROGRESS_DELAY_SECONDS, unit=" rows")
        try:
            with progress:
                for index, built in zip(rows, stream.build(rows), strict=True):
                    sample = faults.admit(index, built)
                    if sample is not None:
                        self._samples.append(sample)
                    progress.update()
        finally:
            stream.close()
        faults.check_share(len(rows))
        faults.summarize(len(rows))
        self._order = array("q", range(len(self._samples)))

    def __len__(self) -> int:
        return len(self._samples)

    def at(self, position: int) -> Sample:
        """The sample at a position."""
        return self._samples[self._order[position]]

    def shuffle(self, seed: int, epoch: int) -> None:
        """Order the positions for an epoch."""
        self._order = epoch_order(seed, epoch, len(self._samples))

    def close(self) -> None:
        """Nothing is open after reading."""


class StreamStore:
    """Rows built when they are asked for, ahead of the reader when there are workers."""

    def __init__(self, table: RowTable, rows: range, stream: RowStream, faults: RowFaults) -> None:
        if not rows:
            faults.summarize(0)
        self._rows = rows
        self._stream = stream
        self._faults = faults
        self._shards = [part for shard in table.shards if (part := _common_part(shard, rows))]
        self._order: Sequence[int] = rows
        self._next = 0
        self._reader: Iterator[Built] | None = None
        self._usable = 0
        self._visited = 0

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, position: int) -> Sample | None:
        """The sample at a position; None where the row is bad or its prompt too long."""
        if self._reader is None or position != self._next:
            self._reader = self._stream.build(self._order[i] for i in range(position, len(self._order)))
        self._next = position + 1
        sample = self._faults.admit(self._order[position], next(self._reader))
        self._faults.check_share(len(self._rows))
        self._visited += 1
        self._usable += sample is not None
        if self._visited >= len(self._rows) and self._usable == 0:
            raise DataError(self._faults.nothing_left())
        return sample

    def shuffle(self, seed: int, epoch: int) -> None:
        """Order the positions for an epoch: shards at random, rows at random within each of them."""
        self._order = shard_order(seed, epoch, self._shards)
        self._reader = None

    def close(self) -> None:
        """End worker processes."""
        self._reader = None
        self._stream.close()


def _common_part(a: range, b: range) -> range:
    """Common part of two consecutive ranges."""
    return range(max(a.start, b.start), min(a.stop, b.stop))
