"""Staleness: by sample, and by token where spans are known."""

import pytest

from slime.observability.staleness import compute_staleness
from slime.version_spans import VersionSpan


def test_samples_count_versions_behind_the_newest():
    versions = [("3",), ("1", "3"), ("default",), (), ("4",)]
    assert compute_staleness(versions, None, 3) == {
        "rollout/weight_version/behind": (0 + 2 + 3 + 0) / 4,
        "rollout/weight_version/stale_share": 0.5,
    }
    assert compute_staleness(versions, None, 0) == {}
    assert compute_staleness([(), ()], None, 3) == {}


def test_tokens_are_weighed_by_their_number():
    spans = [[VersionSpan("3", 0, 5)], [VersionSpan("1", 2, 4), VersionSpan("3", 4, 5)], [VersionSpan("default", 0, 2)]]
    found = compute_staleness([("3",), ("1", "3"), ("default",)], spans, 3)
    by_token = {name.removeprefix("rollout/weight_version/"): value for name, value in found.items() if "token" in name}
    assert by_token == pytest.approx(
        {
            "token_behind": (6 * 0 + 2 * 2 + 2 * 3) / 10,
            "token_behind_max": 3,
            "stale_token_share": 0.4,
            "token_share_behind_0": 0.6,
            "token_share_behind_2": 0.2,
            "token_share_behind_3": 0.2,
        }
    )
    assert not any("token" in name for name in compute_staleness([("3",)], [[]], 3))
