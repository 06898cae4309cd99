"""Every row of the table of differences holds on the engine it speaks of, and the page shows the table."""

from __future__ import annotations

import pytest

from tests.conformance.differences import DIFFERENCES, PAGE, Difference, with_table
from tests.conformance.targets import Target


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda row: row.topic)
def test_row(direct: Target, difference: Difference) -> None:
    assert difference.probe(direct) == difference.expected[direct.kind]


def test_page_is_current() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run python -m tests.conformance.differences"
