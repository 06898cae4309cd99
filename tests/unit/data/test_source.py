"""Cursor, buffer and exact resume of data sources."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.data.foreign import build_data_source
from slime.data.source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first
from slime.errors import DataError, PluginError
from slime.types import Group, Sample
from tests.support.prompts import data_args


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "label": i}) + "\n" for i in range(5)))
    return file


def prompts(groups: list[Group]) -> list[Any]:
    return [group[0].prompt for group in groups]


def as_dicts(groups: list[Group]) -> list[list[dict[str, Any]]]:
    return [[sample.to_dict() for sample in group] for group in groups]


def test_groups_and_counters(path: Path) -> None:
    source = RolloutDataSource(data_args(path, n_samples_per_prompt=3))
    groups = source.get_samples(2) + source.get_samples(1)
    assert [[s.index for s in g] for g in groups] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [{s.group_index for s in g} for g in groups] == [{0}, {1}, {2}]
    assert [[s.prompt for s in g] for g in groups] == [[f"p{i}"] * 3 for i in range(3)]
    groups[0][0].metadata["x"] = 1
    assert groups[0][1].metadata == {}
    assert len(source) == 5


def test_wraps_as_often_as_needed(path: Path) -> None:
    source = RolloutDataSource(data_args(path))
    assert prompts(source.get_samples(13)) == [f"p{i % 5}" for i in range(13)]
    assert (source.epoch_id, source.sample_offset) == (2, 3)


def test_every_epoch_is_a_permutation(path: Path) -> None:
    source = RolloutDataSource(data_args(path, rollout_shuffle=True))
    drawn = prompts(source.get_samples(15))
    epochs = [drawn[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(epoch) == [f"p{i}" for i in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_data_set() -> None:
    source = RolloutDataSource(data_args(None, rollout_global_dataset=False))
    assert prompts(source.get_samples(2)) == ["", ""]
    source.save(0)
    source.load(0)
    assert len(source) == 0


def test_read_only_source_drops_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = RolloutDataSource(data_args(path))
    source.add_samples(source.get_samples(1))
    assert "RolloutDataSourceWithBuffer" in caplog.text
    assert prompts(source.get_samples(1)) == ["p1"]


def test_buffer_is_handed_out_first(path: Path) -> None:
    source = RolloutDataSourceWithBuffer(data_args(path))
    first = source.get_samples(3)
    source.add_samples(first[1:])
    assert source.get_buffer_length() == 2
    assert prompts(source.get_samples(3)) == ["p1", "p2", "p3"]
    assert source.get_buffer_length() == 0


@pytest.mark.parametrize("bad", [[[Sample()]], [Sample()], [[Sample()] * 3]])
def test_only_whole_groups_are_taken_back(path: Path, bad: Any) -> None:
    source = RolloutDataSourceWithBuffer(data_args(path))
    with pytest.raises(DataError, match=r"groups .lists. of 2 samples .--n-samples-per-prompt"):
        source.add_samples(bad)


def test_pop_first() -> None:
    buffer = [[Sample(index=i)] for i in range(3)]
    assert [g[0].index for g in pop_first(None, None, buffer, 2)] == [0, 1]
    assert [g[0].index for g in pop_first(None, 7, buffer, 2)] == [2]
    assert buffer == []


def test_filter_from_a_file_with_four_arguments(path: Path, tmp_path: Path) -> None:
    (tmp_path / "newest.py").write_text(
        "def newest(args, rollout_id, buffer, num_samples):\n"
        "    assert rollout_id is None and args.n_samples_per_prompt == 2\n"
        "    taken = buffer[-num_samples:]\n"
        "    del buffer[-num_samples:]\n"
        "    return taken\n"
    )
    source = RolloutDataSourceWithBuffer(data_args(path, buffer_filter_path=str(tmp_path / "newest.py")))
    source.add_samples(source.get_samples(3))
    assert prompts(source.get_samples(1)) == ["p2"]


def test_filter_as_an_overridden_method_that_only_selects(path: Path) -> None:
    class Mine(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args: Any, buffer: list[Group], num_samples: int) -> list[Group]:  # type: ignore[override]
            return sorted(buffer, key=lambda group: -group[0].label)[:num_samples]

    source = Mine(data_args(path))
    source.add_samples(source.get_samples(3))
    assert prompts(source.get_samples(2)) == ["p2", "p1"]
    assert prompts(source.get_samples(2)) == ["p0", "p3"]


def test_filter_that_returns_too_much(path: Path) -> None:
    class Mine(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args: Any, buffer: list[Group], num_samples: int) -> list[Group]:  # type: ignore[override]
            return list(buffer)

    source = Mine(data_args(path))
    source.add_samples(source.get_samples(3))
    with pytest.raises(PluginError, match=r"at most 2 groups, found 3 groups"):
        source.get_samples(2)


WRITTEN_SNIPPET = '''
from slime.rollout.data_source import RolloutDataSource

def select_best(buffer, num_samples):
    return sorted(buffer, key=lambda group: -group[0].label)[:num_samples]

class MyDataSource(RolloutDataSource):
    def get_samples(self, num_samples):
        """Fetch prompts from dataset."""
        return self.dataset.sample(num_samples)

    def add_samples(self, samples):
        pass

class MyBuffer(RolloutDataSource):
    def __init__(self):
        self.buffer = []

    def add_samples(self, samples):
        self.buffer.extend(samples)

    def buffer_filter(self, args, buffer, num_samples):
        return select_best(buffer, num_samples)

class Foreign:
    def __init__(self, args):
        self.extra = 3
    def get_samples(self, num_samples):
        return [["x"]] * num_samples
    def add_samples(self, samples):
        self.got = samples

class Incomplete:
    def get_samples(self, num_samples):
        return []
'''


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    file = tmp_path / "sources.py"
    file.write_text(WRITTEN_SNIPPET)
    return str(file)


def test_documented_source(path: Path, plugin: str) -> None:
    source = build_data_source(data_args(path, data_source_path=f"{plugin}:MyDataSource"))
    groups = source.get_samples(2) + source.get_samples(4)
    assert prompts(groups) == ["p0", "p1", "p2", "p3", "p4", "p0"]
    assert [len(g) for g in groups] == [2] * 6


def test_documented_buffer(path: Path, plugin: str) -> None:
    source = build_data_source(data_args(path, data_source_path=f"{plugin}:MyBuffer"))
    source.add_samples(source.get_samples(3))
    assert prompts(source.get_samples(5)) == ["p2", "p1", "p0", "p3", "p4"]


def test_foreign_source(path: Path, plugin: str, caplog: pytest.LogCaptureFixture) -> None:
    source = build_data_source(data_args(path, data_source_path=f"{plugin}:Foreign"))
    assert (source.get_samples(2), source.extra, len(source)) == ([["x"]] * 2, 3, 0)
    source.add_samples([1])
    source.snapshot(0)
    source.save(0)
    assert source.got == [1]
    assert "has no save" in caplog.text


def test_incomplete_source(path: Path, plugin: str) -> None:
    with pytest.raises(PluginError, match=r"--data-source-path.*missing: add_samples"):
        build_data_source(data_args(path, data_source_path=f"{plugin}:Incomplete"))


def test_saved_state_has_the_established_layout(path: Path, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(data_args(path, save=str(tmp_path)))
    source.update_metadata({"done": [1]})
    source.get_samples(7)
    source.save(4)
    state = torch.load(tmp_path / "rollout" / "global_dataset_state_dict_4.pt", weights_only=False)
    established = {k: state[k] for k in ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")}
    assert established == {
        "sample_offset": 2,
        "epoch_id": 1,
        "sample_group_index": 7,
        "sample_index": 14,
        "metadata": {"done": [1]},
    }
    assert [file.name for file in (tmp_path / "rollout").iterdir()] == ["global_dataset_state_dict_4.pt"]


def test_established_state_loads(path: Path, tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    state = {"sample_offset": 3, "epoch_id": 1, "sample_group_index": 8, "sample_index": 16, "metadata": {}}
    torch.save(state, tmp_path / "rollout" / "global_dataset_state_dict_0.pt")
    source = RolloutDataSource(data_args(path, load=str(tmp_path)))
    source.load(0)
    assert source.get_samples(1)[0][0].index == 16


@pytest.mark.parametrize("streaming", [False, True])
def test_resume_is_exact_whatever_was_prefetched(path: Path, tmp_path: Path, streaming: bool) -> None:
    how = {"rollout_shuffle": True, "streaming_data": streaming}
    source = RolloutDataSourceWithBuffer(data_args(path, save=str(tmp_path), **how))
    source.get_samples(3)
    source.snapshot(0)
    groups = source.get_samples(4)
    groups[0][0].response = "partial"
    groups[0][0].tokens = [1, 2]
    source.add_samples(groups[:1])
    source.snapshot(1)
    expected = as_dicts(source.get_samples(3))  # prefetched for rollout 2, then changed, then lost
    source.snapshot(2)
    source.get_samples(6)
    source.save(1)

    resumed = RolloutDataSourceWithBuffer(data_args(path, load=str(tmp_path), **how))
    resumed.load(1)
    found = resumed.get_samples(3)
    assert as_dicts(found) == expected
    assert found[0][0].response == "partial"


def test_snapshots_are_bounded(path: Path) -> None:
    source = RolloutDataSourceWithBuffer(data_args(path, async_buffer_size=2))
    for rollout_id in range(20):
        source.get_samples(1)
        source.snapshot(rollout_id)
    assert source.state_for(15)["sample_index"] == 32
    assert len(source._snapshots) == 5


def test_missing_and_broken_state(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = RolloutDataSource(data_args(path, load=str(tmp_path)))
    with caplog.at_level(logging.INFO):
        source.load(-1)
        assert caplog.text == ""
        source.load(3)
    assert "global_dataset_state_dict_3.pt" in caplog.text
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "global_dataset_state_dict_3.pt").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"not a usable data source state"):
        source.load(3)


def test_tokenizer_comes_from_the_checkpoint(path: Path, checkpoint: str) -> None:
    args = data_args(path, checkpoint, apply_chat_template=True)
    assert "<|im_start|>user\np0<|im_end|>" in str(RolloutDataSource(args).get_samples(1)[0][0].prompt)
    with pytest.raises(DataError, match=r"--hf-checkpoint"):
        RolloutDataSource(data_args(path, str(path.parent), apply_chat_template=True))
