"""Rows by number, slices and places."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.data.files import (
    JsonlTable,
    ParquetTable,
    decode_json_row,
    head_rows,
    open_table,
    read_file,
)
from slime.errors import DataError

ROWS = [{"prompt": f"p{i}", "metadata": {"i": i}} for i in range(10)]


@pytest.fixture(params=["jsonl", "parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / f"rows.{request.param}"
    if request.param == "jsonl":
        file.write_text("\n".join(json.dumps(row) for row in ROWS))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=4)
    return file


def test_rows_in_order(path: Path) -> None:
    assert list(read_file(str(path))) == ROWS


@pytest.mark.parametrize(
    "suffix", ["[2:5]", "[:3]", "[7:]", "[-3:]", "[:-2]", "[-4:-1]", "[:]", "[5:2]", "[0:1000]", "[20:]"]
)
def test_slice_is_that_of_a_list(path: Path, suffix: str) -> None:
    expected = eval(f"ROWS{suffix}")
    assert list(read_file(f"{path}@{suffix}")) == expected


def test_random_access(path: Path) -> None:
    table = open_table(str(path))
    assert [table.row(i) for i in (9, 0, 4, 3, 9)] == [ROWS[i] for i in (9, 0, 4, 3, 9)]
    assert [i for shard in table.shards for i in shard] == list(range(10))


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n\n  \n{"a": 2}\nbroken\n')
    table = JsonlTable(str(file))
    assert len(table) == 3
    assert table.location(1) == f"{file}:4"
    with pytest.raises(DataError, match=rf"{file}:5.*broken"):
        table.row(2)
    assert [(isinstance(row, dict), place) for row, place in head_rows(str(file))] == [
        (True, f"{file}:1"),
        (True, f"{file}:4"),
        (False, f"{file}:5"),
    ]


def test_parquet_places(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    assert ParquetTable(str(file)).location(4) == f"{file}, row 5"


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no.jsonl"):
        open_table(str(tmp_path / "no.jsonl"))
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(ValueError, match=r"'.csv'.*\.jsonl and \.parquet"):
        open_table(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("line", ["[1]", '"text"', "3"])
def test_a_row_is_an_object(line: str) -> None:
    with pytest.raises(DataError, match=r"f:1: a row must be a JSON object"):
        decode_json_row(line, "f:1")
