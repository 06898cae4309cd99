import io

import torch

from slime.cluster.checkpoints import prune_data_states, take_data_state, write_data_state
from slime.data.source import RolloutDataSource


class Counting(RolloutDataSource):
    def __init__(self):
        self.position = 0

    def state_for(self, rollout_id):
        return {"rollout": rollout_id, "position": self.position}


class SavesItself(Counting):
    def save(self, rollout_id):
        self.saved = rollout_id, self.position


def test_a_state_taken_is_not_moved_by_later_rollouts(tmp_path):
    source = Counting()
    source.position = 4
    content = take_data_state(source, 0)
    source.position = 12
    write_data_state(tmp_path, 0, content)
    (path,) = (tmp_path / "rollout").glob("*.pt")
    assert path.name == "global_dataset_state_dict_0.pt"
    assert torch.load(io.BytesIO(path.read_bytes()), weights_only=False) == {"rollout": 0, "position": 4}


def test_a_source_with_a_save_of_its_own_writes_when_it_is_at_the_rollout():
    source = SavesItself()
    source.position = 4
    assert take_data_state(source, 3) is None
    assert source.saved == (3, 4)


def test_pruning_keeps_states_of_checkpoints_and_of_rollouts_ahead(tmp_path):
    for rollout_id in range(5):
        write_data_state(tmp_path, rollout_id, b"x")
    (tmp_path / "iter_0000001").mkdir()
    prune_data_states(tmp_path, None, newest=3)
    assert len(list((tmp_path / "rollout").glob("*.pt"))) == 5
    prune_data_states(tmp_path, 2, newest=3)
    kept = sorted(int(p.stem.rpartition("_")[2]) for p in (tmp_path / "rollout").glob("*.pt"))
    assert kept == [1, 3, 4]
