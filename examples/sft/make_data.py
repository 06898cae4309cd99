"""Turn the quickstart's rows into conversations: the prompt, then the right answer as the assistant's turn."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tools.generate_comparison_data import write_jsonl


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """The conversation of a row with ``prompt`` and ``label``; only the answer is trained.

    The prompt holds an example whose answer is the same in every row, hence ``step_loss_mask``.
    """
    shown = [{**m, "step_loss_mask": 0} if m["role"] == "assistant" else m for m in row["prompt"]]
    return {"messages": [*shown, {"role": "assistant", "content": row["label"]}]}


def main(argv: list[str] | None = None) -> int:
    """Command line: ``python -m examples.sft.make_data --input DIR --output DIR``."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True, help="directory with train.jsonl and eval.jsonl")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in ("train.jsonl", "eval.jsonl"):
        lines = (args.input / name).read_text(encoding="utf-8").splitlines()
        write_jsonl(args.output / name, [conversation(json.loads(line)) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
