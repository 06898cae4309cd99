"""Collects what the layout tests measured and prints it as one table at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from tests.parallel import algorithm_table
from tests.parallel.traces import LIMIT, Differences, Trace, compare


@dataclass(kw_only=True)
class Row:
    """One comparison; without differences when the layout did not even run."""

    layout: str
    model: str
    loss: str
    differences: Differences | None = None


class Table:
    """The rows so far."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def compare(self, layout: str, model: str, loss: str, run: Callable[[], Trace], want: Trace) -> Differences:
        """Run a layout, compare it and add a row."""
        row = Row(layout=layout, model=model, loss=loss)
        self.rows.append(row)
        row.differences = compare(run(), want)
        return row.differences


TABLE = pytest.StashKey[Table]()


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    """What is printed at the end."""
    return request.config.stash.setdefault(TABLE, Table())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(TABLE, Table()).rows
    if not rows:
        return
    terminalreporter.section(f"layouts against one process, limit {LIMIT:g} per optimizer step")
    widths = [max(len(word) for word in column) for column in zip(*map(_words, rows), _HEADINGS, strict=True)]
    titles = " ".join(f"{title:>10}" for title in ("loss diff", "grad norm", "weights", "log-probs"))
    terminalreporter.write_line(f"{_padded(_HEADINGS, widths)} {titles}")
    for row in rows:
        d = row.differences
        numbers = "did not run" if d is None else " ".join(map(_number, (d.loss, d.grad_norm, d.weights, d.log_probs)))
        verdict = "pass" if d is not None and d.passes else "FAIL"
        terminalreporter.write_line(f"{_padded(_words(row), widths)} {numbers}  {verdict}")
    terminalreporter.section("algorithms and their reference tests")
    terminalreporter.write_line(algorithm_table.table())


_HEADINGS = ("layout", "model or batch", "loss")


def _words(row: Row) -> tuple[str, str, str]:
    return row.layout, row.model, row.loss


def _padded(words: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(word.ljust(width) for word, width in zip(words, widths, strict=True))


def _number(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.1e}':>10}"
