"""Generate prompts that ask for the larger of two numbers, as ``train.jsonl`` and ``eval.jsonl``.

A row is ``{"prompt": [messages], "label": "82"}``. No pair of numbers of the evaluation set occurs in the
training set in either order, so a rising held-out score cannot come from remembered questions. Training rows
come in twos, a pair of numbers in both orders: read in the order of the file, every batch of an even number of
prompts pays the same for always naming the first number as for always naming the second, so that only comparing
gains anything. The same seed gives the same bytes.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

LOWEST, HIGHEST = 10, 99
# One worked example: without it most answers are sentences that run into the length limit. With these words the small
# model of the quickstart names either number about as often; with others it starts with always naming the first.
SHARED_MESSAGES = (
    {"role": "system", "content": "Which number is larger?"},
    {"role": "user", "content": "64 and 27"},
    {"role": "assistant", "content": "64"},
)


def generate_rows(num_train: int, num_eval: int, seed: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return (training rows, evaluation rows).

    Args:
        num_train: rows of the training set, an even number.
        num_eval: rows of the evaluation set.
        seed: seed of the choice of pairs and of the order within each.

    Raises:
        ValueError: the training rows are not in twos, or more pairs are asked for than there are.
    """
    if num_train % 2:
        raise ValueError(f"{num_train} training rows asked for; they come in twos, so ask for an even number")
    pairs = list(combinations(range(LOWEST, HIGHEST + 1), 2))
    num_pairs = num_train // 2 + num_eval
    if num_pairs > len(pairs):
        raise ValueError(f"{num_pairs} pairs of numbers needed, but there are {len(pairs)}")
    generator = random.Random(seed)
    chosen = [pair if generator.random() < 0.5 else pair[::-1] for pair in generator.sample(pairs, num_pairs)]
    train_pairs, eval_pairs = chosen[: num_train // 2], chosen[num_train // 2 :]
    train_rows = [build_row(*order) for pair in train_pairs for order in (pair, pair[::-1])]
    return train_rows, [build_row(*pair) for pair in eval_pairs]


def build_row(first: int, second: int) -> dict[str, object]:
    """Return one row that asks about ``first`` and ``second``."""
    question = {"role": "user", "content": f"{first} and {second}"}
    return {"prompt": [*SHARED_MESSAGES, question], "label": str(max(first, second))}


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Write one JSON object a line; the file appears complete or not at all."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    aside.rename(path)


def main(argv: list[str] | None = None) -> int:
    """Command line: ``python -m tools.generate_comparison_data --output DIR``."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="directory that gets train.jsonl and eval.jsonl")
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--num-eval", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        train_rows, eval_rows = generate_rows(args.num_train, args.num_eval, args.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.output / "train.jsonl", train_rows)
    write_jsonl(args.output / "eval.jsonl", eval_rows)
    print(f"{args.output}: {len(train_rows)} training rows, {len(eval_rows)} evaluation rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
