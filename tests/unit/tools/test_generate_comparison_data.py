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
    match = re.fullmatch(r"(\d+) and (\d+)", messages[-1]["content"])
    assert match
    return int(match[1]), int(match[2])


def test_label_is_the_larger_number_and_order_is_mixed() -> None:
    train, held_out = generate_rows(1000, 400, seed=3)
    assert all(row["label"] == str(max(asked_numbers(row))) for row in train + held_out)
    for rows in (train[::2], held_out):
        larger_first = sum(first > second for first, second in map(asked_numbers, rows))
        assert 0.4 < larger_first / len(rows) < 0.6


def test_each_training_pair_comes_in_both_orders_one_after_the_other() -> None:
    train, _ = generate_rows(1000, 100, seed=3)
    asked = [asked_numbers(row) for row in train]
    assert all(second == first[::-1] for first, second in zip(asked[::2], asked[1::2], strict=True))


def test_no_pair_is_in_both_sets_in_either_order() -> None:
    train, held_out = generate_rows(2000, 200, seed=0)
    train_pairs = {frozenset(asked_numbers(row)) for row in train}
    held_out_pairs = {frozenset(asked_numbers(row)) for row in held_out}
    assert len(train_pairs) == 1000
    assert len(held_out_pairs) == 200
    assert not train_pairs & held_out_pairs


def test_files_are_rows_of_messages_and_labels(tmp_path: Path) -> None:
    arguments = ["--num-train", "6", "--num-eval", "2", "--seed", "7", "--output"]
    assert generate_comparison_data.main([*arguments, str(tmp_path / "a")]) == 0
    assert generate_comparison_data.main([*arguments, str(tmp_path / "b")]) == 0
    for name, count in (("train.jsonl", 6), ("eval.jsonl", 2)):
        text = (tmp_path / "a" / name).read_text()
        assert text == (tmp_path / "b" / name).read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert len(rows) == count
        assert all(row.keys() == {"prompt", "label"} for row in rows)
        assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user", "assistant", "user"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["eval.jsonl", "train.jsonl"]


def test_another_seed_gives_other_rows() -> None:
    assert generate_rows(20, 5, seed=1) != generate_rows(20, 5, seed=2)


@pytest.mark.parametrize(
    ("num_train", "num_eval", "message"),
    [(8000, 6, "4006 pairs of numbers needed, but there are 4005"), (7, 2, "ask for an even number")],
)
def test_rows_that_cannot_be_made_are_refused(
    num_train: int, num_eval: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = ["--num-train", str(num_train), "--num-eval", str(num_eval)]
    assert generate_comparison_data.main([*counts, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
