"""The generated prompts: format, correctness, no leak, same bytes for the same seed."""

import json
import re
from pathlib import Path

import pytest

from tools import generate_comparison_data
from tools.generate_comparison_data import generate_rows


def asked_numbers(row: dict[str, object]) -> tuple[int, int]:
    messages = row["prompt"]
    assert isinstance(messages, list)
    match = re.fullmatch(r"(\d+) or (\d+)", messages[-1]["content"])
    assert match
    return int(match[1]), int(match[2])


def test_label_is_the_larger_number_and_order_is_mixed() -> None:
    train, _ = generate_rows(1000, 100, seed=3)
    assert all(row["label"] == str(max(asked_numbers(row))) for row in train)
    larger_first = sum(first > second for first, second in map(asked_numbers, train))
    assert 400 < larger_first < 600


def test_no_pair_is_in_both_sets_in_either_order() -> None:
    train, held_out = generate_rows(2000, 200, seed=0)
    train_pairs = {frozenset(asked_numbers(row)) for row in train}
    held_out_pairs = {frozenset(asked_numbers(row)) for row in held_out}
    assert len(train_pairs) == 2000
    assert len(held_out_pairs) == 200
    assert not train_pairs & held_out_pairs


def test_files_are_rows_of_messages_and_labels(tmp_path: Path) -> None:
    arguments = ["--num-train", "5", "--num-eval", "2", "--seed", "7", "--output"]
    assert generate_comparison_data.main([*arguments, str(tmp_path / "a")]) == 0
    assert generate_comparison_data.main([*arguments, str(tmp_path / "b")]) == 0
    for name, count in (("train.jsonl", 5), ("eval.jsonl", 2)):
        text = (tmp_path / "a" / name).read_text()
        assert text == (tmp_path / "b" / name).read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert len(rows) == count
        assert all(row.keys() == {"prompt", "label"} for row in rows)
        assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user", "assistant", "user"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["eval.jsonl", "train.jsonl"]


def test_another_seed_gives_other_rows() -> None:
    assert generate_rows(20, 5, seed=1) != generate_rows(20, 5, seed=2)


def test_too_many_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_comparison_data.main(["--num-train", "4000", "--num-eval", "6", "--output", str(tmp_path)]) == 2
    assert "there are 4005 pairs" in capsys.readouterr().err
