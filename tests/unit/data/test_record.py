"""Dumps of rollouts come back as they were."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slime.data.record import dump_path, load_rollout, regroup, save_rollout, take_both_ends
from slime.errors import DataError
from slime.types import Sample, Status


def test_round_trip_with_user_attributes(tmp_path: Path) -> None:
    sample = Sample(
        index=3,
        group_index=1,
        tokens=[1, 2, 3],
        response_length=1,
        reward={"score": 1},
        status=Status.TRUNCATED,
        rollout_routed_experts=np.ones((2, 1, 1), dtype=np.int32),
    )
    sample.trace = {"version": 1, "events": []}  # type: ignore[attr-defined]
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    path = save_rollout(template, 5, [[sample, [Sample(index=4, rollout_id=9), Sample(index=5, rollout_id=9)]]])
    assert path == tmp_path / "dumps" / "5.pt"
    assert torch.load(path, weights_only=False)["rollout_id"] == 5
    loaded = load_rollout(template, 5)
    assert [s.index for s in loaded] == [3, 4, 5]
    np.testing.assert_equal(loaded[0].to_dict(), sample.to_dict())
    assert [file.name for file in path.parent.iterdir()] == ["5.pt"]


def test_evaluation_has_a_file_of_its_own(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.pt")
    assert save_rollout(template, 2, [[Sample()]], evaluation=True).name == "eval_2.pt"
    assert len(load_rollout(template, 2, evaluation=True)) == 1
    with pytest.raises(DataError, match=r"no rollout dump at .*2.pt .--load-debug-rollout-data"):
        load_rollout(template, 2)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, [0, 1, 7, 8, 9]), (0.3, [0, 8, 9]), (0.1, [9]), (0.05, []), (1.0, list(range(10)))]
)
def test_subsample_takes_both_ends(share: float, expected: list[int]) -> None:
    assert [s.index for s in take_both_ends([Sample(index=i) for i in range(10)], share)] == expected


def test_faults(tmp_path: Path) -> None:
    (tmp_path / "1.pt").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"not a rollout dump"):
        load_rollout(str(tmp_path / "{rollout_id}.pt"), 1)
    with pytest.raises(DataError, match=r"only {rollout_id}"):
        dump_path("{step}.pt", 1)


def test_regroup() -> None:
    samples = [Sample(index=i, group_index=g) for i, g in enumerate([1, 0, 1, None, None])]
    assert [[s.index for s in group] for group in regroup(samples)] == [[0, 2], [1], [3], [4]]
