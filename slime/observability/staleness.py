"""How old the weights were that generated a rollout: by sample and by token.

Versions count the synchronisations; the newest one is what the engines were given last. Tests hold the arithmetic.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from slime.version_spans import VersionSpan, version_number

PREFIX = "rollout/weight_version"


def compute_staleness(
    versions: Sequence[Sequence[str]], spans: Sequence[Sequence[VersionSpan]] | None, newest: int
) -> dict[str, float]:
    """Staleness of the samples of a rollout, and of its tokens where spans are known.

    Args:
        versions: Per sample the weight versions of its tokens; none where nobody recorded them.
        spans: Per sample the tokens that each version generated; None where nobody recorded them.
        newest: Version that the engines were given last; 0 before the first.

    Returns:
        ``rollout/weight_version/behind``, mean number of versions by which a sample's oldest token lags, and
        ``/stale_share``, samples with such a token. By token ``/token_behind`` (mean), ``/token_behind_max``,
        ``/stale_token_share`` and, for each number of versions k that occurs, ``/token_share_behind_{k}``. A name
        that is no number is the engine's own for weights that it loaded itself, which is version 0.
    """
    oldest = [min(version_number(v) for v in row) for row in versions if row]
    if not newest or not oldest:
        return {}
    behind = [max(newest - version, 0) for version in oldest]
    return {
        f"{PREFIX}/behind": statistics.fmean(behind),
        f"{PREFIX}/stale_share": sum(b > 0 for b in behind) / len(behind),
        **_token_staleness(spans or (), newest),
    }


def _token_staleness(spans: Sequence[Sequence[VersionSpan]], newest: int) -> dict[str, float]:
    counts: Counter[int] = Counter()
    for span in (span for row in spans for span in row):
        counts[max(newest - version_number(span.version), 0)] += span.end - span.start
    total = counts.total()
    if not total:
        return {}
    shares = {f"{PREFIX}/token_share_behind_{k}": n / total for k, n in sorted(counts.items())}
    return {
        f"{PREFIX}/token_behind": sum(k * n for k, n in counts.items()) / total,
        f"{PREFIX}/token_behind_max": float(max(counts)),
        f"{PREFIX}/stale_token_share": 1 - counts[0] / total,
        **shares,
    }
