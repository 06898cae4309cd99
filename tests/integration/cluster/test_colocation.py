"""Trainers and engines that share their device, all of them real, in the order that memory needs."""

from functools import partial
from unittest import mock

import pytest

from slime.cli import parse_args
from slime.cluster import actor_critic
from slime.cluster.engines import EngineGroup
from slime.cluster.trainer import TrainerGroup
from slime.observability.tracking import read_metrics
from tests.e2e.commands import arguments, make_inputs
from tests.integration.cluster.moving_workers import TURNS, note
from train import train

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

MEET = ["actor hold parameters", "engines resume weights"]
PART = ["actor sleep", "engines resume kv_cache+cuda_graph"]
TO_CRITIC, TO_ACTOR = ["actor sleep", "critic wake up"], ["critic sleep", "actor wake up"]


class RecordedEngines(EngineGroup):
    """The engines of a run; they refuse to generate or to take weights without the memory for it."""

    def release_memory(self, tags=None):
        super().release_memory(tags)
        note(self._config.logging.output_dir, "engines release")

    def resume_memory(self, tags=None):
        super().resume_memory(tags)
        note(self._config.logging.output_dir, f"engines resume {'+'.join(tags)}")


def test_a_ppo_run_in_one_memory(tmp_path):
    inputs = make_inputs(tmp_path)
    output = tmp_path / "run"
    output.mkdir()
    argv = arguments(inputs, output, 2, "--colocate", "--device", "cpu", "--advantage-estimator", "ppo")
    argv += ["--rollout-backend", "embedded", "--save", str(tmp_path / "ckpt")]
    workers = "tests.integration.cluster.moving_workers:"
    with (
        mock.patch("slime.cluster.launch.EngineGroup", RecordedEngines),
        mock.patch.object(actor_critic, "TrainerGroup", partial(TrainerGroup, worker_path=f"{workers}MovingActor")),
        mock.patch.object(actor_critic, "CRITIC_PATH", f"{workers}MovingCritic"),
        mock.patch.object(actor_critic.ActorCritic, "_share_gpus", True),
    ):
        train(parse_args(argv))
    update = ["critic score", *TO_ACTOR, "actor train", *TO_CRITIC, "critic train", *TO_ACTOR]
    step = ["engines release", "actor wake up", *TO_CRITIC, *update]
    save = [*TO_CRITIC, "critic save", *TO_ACTOR, "actor save"]
    sync = [*MEET, "actor update weights", *PART]
    start = ["engines release", "critic init", "critic sleep", "actor init"]
    assert (output / TURNS).read_text().splitlines() == [*start, *sync, *step, *sync, *step, *save, *sync]
    rows = [row for row in read_metrics(output / "metrics.jsonl") if "train/loss" in row]
    assert [row["train/step"] for row in rows] == [0, 1]
    # The engine's log-probs are those of the weights that came back: else the sync, or the turn before it, lost some.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows)
