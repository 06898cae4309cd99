"""Spans of weight versions: read from replies, joined, clipped, checked."""

import pytest

from slime.version_spans import (
    VersionSpan,
    append_spans,
    check_spans,
    clip_spans,
    spans_of_reply,
    version_number,
)


def test_a_reply_names_spans_or_one_version() -> None:
    rows = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    assert spans_of_reply({"weight_versions": rows}, 5) == [VersionSpan("3", 0, 2), VersionSpan("4", 2, 5)]
    assert spans_of_reply({"weight_versions": rows}, 1) == [VersionSpan("3", 0, 1)]
    assert spans_of_reply({"weight_version": 7}, 3) == [VersionSpan("7", 0, 3)]
    assert spans_of_reply({"weight_version": 7}, 0) == []
    assert spans_of_reply({}, 3) == []


def test_neighbours_of_one_version_become_one() -> None:
    spans = append_spans([VersionSpan("1", 0, 2)], [VersionSpan("1", 0, 3), VersionSpan("2", 3, 4)], 2)
    assert spans == [VersionSpan("1", 0, 5), VersionSpan("2", 5, 6)]
    # A gap, such as a tool's answer, keeps them apart.
    assert append_spans(spans, [VersionSpan("2", 0, 1)], 8) == [*spans, VersionSpan("2", 8, 9)]


def test_spans_end_where_the_response_does() -> None:
    spans = [VersionSpan("default", 0, 1), VersionSpan("2", 3, 5)]
    assert [version_number(span.version) for span in spans] == [0, 2]
    assert clip_spans(spans, 4) == [VersionSpan("default", 0, 1), VersionSpan("2", 3, 4)]
    assert clip_spans(spans, 3) == spans[:1]


@pytest.mark.parametrize("spans", [[(0, 4)], [(0, 2), (1, 3)], [(1, 1)], [(2, 3), (0, 1)]])
def test_spans_that_do_not_fit_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="must rise within the response of 3 tokens"):
        check_spans([VersionSpan("1", *span) for span in spans], 3)
    check_spans([VersionSpan("1", 0, 1), VersionSpan("2", 2, 3)], 3)
