"""Say what a quickstart run achieved: the held-out score before and after, from the run's ``metrics.jsonl``."""

import argparse
import sys
from pathlib import Path

from slime.observability.tracking import read_metrics

SCORE = "eval/larger"


def read_scores(metrics_path: Path) -> list[float]:
    """Return the held-out accuracies in the order in which they were measured.

    Raises:
        FileNotFoundError: the run has written no metrics.
    """
    return [row[SCORE] for row in read_metrics(metrics_path) if SCORE in row]


def main(argv: list[str] | None = None) -> int:
    """Command line: ``python examples/quickstart/result.py OUTPUT_DIR``; exit code 1 below ``--minimum-gain``."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("output_dir", type=Path, help="--output-dir of the run")
    parser.add_argument("--minimum-gain", type=float, default=None, help="fail when accuracy rose by less")
    args = parser.parse_args(argv)
    metrics_path = args.output_dir / "metrics.jsonl"
    scores = read_scores(metrics_path) if metrics_path.is_file() else []
    if len(scores) < 2:
        print(f"error: {metrics_path} does not hold two evaluations", file=sys.stderr)
        return 2
    before, after = scores[0], scores[-1]
    gain = after - before
    verb = "rose" if gain >= 0 else "fell"
    print(f"Held-out accuracy {verb} by {abs(gain):.3f}: {before:.3f} before training, {after:.3f} after.")
    if args.minimum_gain is not None and gain < args.minimum_gain:
        print(f"error: a gain of at least {args.minimum_gain:.3f} was asked for", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
