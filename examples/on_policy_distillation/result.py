"""Say what a distillation run achieved, from its ``metrics.jsonl``: reverse KL and held-out accuracy."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from slime.observability.tracking import read_metrics

KL, SCORE = "train/opd_reverse_kl", "eval/larger"


def main(argv: list[str] | None = None) -> int:
    """Command line: ``python -m examples.on_policy_distillation.result OUTPUT``; exit code 1 if the KL did not fall."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("output_dir", type=Path, help="--output-dir of the run")
    args = parser.parse_args(argv)
    rows = list(read_metrics(args.output_dir / "metrics.jsonl"))
    kl = [row[KL] for row in rows if KL in row]
    scores = [row[SCORE] for row in rows if SCORE in row]
    if len(kl) < 2:
        print(f"error: {args.output_dir}/metrics.jsonl holds fewer than two steps with {KL}", file=sys.stderr)
        return 2
    few = max(1, min(3, len(kl) // 2))
    first, last = statistics.fmean(kl[:few]), statistics.fmean(kl[-few:])
    print(f"Reverse KL to the teacher, per token: {first:.4f} in the first {few} steps, {last:.4f} in the last {few}.")
    if len(scores) > 1:
        print(f"Held-out accuracy: {scores[0]:.3f} before, {scores[-1]:.3f} after.")
    return int(last >= first)


if __name__ == "__main__":
    sys.exit(main())
