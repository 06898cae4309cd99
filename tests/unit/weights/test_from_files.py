"""What a host is given to bring its files up to a version."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from slime.errors import WeightSyncError
from slime.weights.from_files import FileSettings, FileUpdater, Published
from slime.weights.pull_request import PullReport, PullRequest
from slime.weights.report import Bucket
from tests.support.weight_updates import endpoints_of

REQUEST = PullRequest(
    local_dir="", base_dir="base", base_version=0, disk_dir="shared", version=1, chain="c", timeout_seconds=0.0
)


class Publisher:
    def publish(self, buckets: Iterable[Bucket], version: int) -> Published:
        return Published(directory=Path("shared"), is_new=False, pull=REQUEST, wire_bytes=0, tensors=0)

    def loaded(self, published: Published) -> None:
        raise AssertionError("no engine loaded anything")


def test_the_second_pull_gets_the_time_that_is_left() -> None:
    given: list[float] = []

    def pull(request: PullRequest) -> list[PullReport]:
        given.append(request.timeout_seconds)
        time.sleep(0.3)
        raise WeightSyncError("no space")

    settings = FileSettings(timeout_seconds=10.0, post_write=None, pause_mode=lambda _: "retract", verifier=None)
    updater = FileUpdater(settings, Publisher, rank=0, world_size=1)
    updater.connect(endpoints_of(["http://127.0.0.1:9"], local_dir="local", pull=pull))
    with pytest.raises(WeightSyncError, match=r"^engine 0: no space$"):
        updater.update([], "1")
    assert 7.0 < given[0] <= 8.0
    assert given[0] - given[1] >= 0.3
