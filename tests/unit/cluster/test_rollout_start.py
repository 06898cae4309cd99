"""``--num-epoch``: the prompts are read once, and everything of the user's sees the number of rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from slime.cluster.actor import ActorSetting
from slime.cluster.rollout import RolloutManager
from slime.config import Config, DataConfig, RolloutConfig
from slime.data.source import RolloutDataSource

SEEN: list[int | None] = []


class WatchfulSource(RolloutDataSource):
    """A user's source that looks at ``args`` when it is built."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        SEEN.append(args.num_rollout)


def generate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Never called."""


def manager(tmp_path: Path, **more: Any) -> RolloutManager:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(7)))
    data = DataConfig(prompt_data=str(prompts), input_key="prompt", num_epoch=2, rollout_batch_size=3, **more)
    rollout = RolloutConfig(rollout_function_path=f"{__name__}:generate")
    config = Config(data=data, rollout=rollout)
    with mock.patch("slime.cluster.rollout.enter"):
        return RolloutManager(ActorSetting.of("rollout", tmp_path), config, {})


def test_the_built_in_source_is_built_once_and_gets_the_final_args(tmp_path: Path) -> None:
    made = manager(tmp_path)
    with mock.patch.object(RolloutDataSource, "_load_dataset", autospec=True, side_effect=read) as reading:
        assert made.start() == 2
    assert reading.call_count == 1
    assert made._source.args.num_rollout == 4


read = RolloutDataSource._load_dataset


def test_a_users_source_is_built_with_the_final_args(tmp_path: Path) -> None:
    SEEN.clear()
    made = manager(tmp_path, data_source_path=f"{__name__}:WatchfulSource")
    assert made.start() == 2
    assert SEEN == [None, 4]
    assert isinstance(made._source, WatchfulSource)
