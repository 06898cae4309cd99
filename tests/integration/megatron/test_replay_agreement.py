"""A rollout of the real engine, by the product's own pipeline, scored by the trainer under the engine's choices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slime.data.batch import build_rollout_batch
from slime.types import RolloutBatch
from tests.support.engine_process import engine_process, router_process
from tests.support.pipeline import rollout
from tests.support.rollout_args import ListSource, open_context
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker

pytestmark = pytest.mark.timeout(240)

SAMPLING = {"rollout_top_p": 0.8, "rollout_top_k": 60, "rollout_temperature": 0.9}
REPLAY = {"use_routing_replay": True, "use_rollout_routing_replay": True}


def truncated_rollout(model_dir: Path) -> RolloutBatch:
    """Twelve samples with kept tokens and routes."""
    flags = SAMPLING | REPLAY | {"rollout_max_response_len": 8, "custom": {"num_layers": 2, "moe_router_topk": 2}}
    with (
        engine_process(model_dir) as engine,
        router_process([engine]) as router,
        open_context(model_dir, router, **flags, n_samples_per_prompt=3) as context,
    ):
        output = rollout(context, ListSource(["What is seven?", "abc", "Two words", "x"], 3))
        return build_rollout_batch(context.args, 0, output.samples)


def test_the_trainer_scores_what_the_engine_sampled(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "model", "qwen3_moe")
    batch = truncated_rollout(model_dir)
    assert batch.rollout_top_p_token_ids is not None
    assert batch.rollout_routed_experts is not None
    data = {"global_batch_size": 12, "micro_batch_size": 5}
    gspo = {"advantage_estimator": "gspo"}  # needs the pass before the update
    config = make_config(model_dir, algorithm=REPLAY | gspo, rollout=SAMPLING, data=data)
    with running_worker(config) as worker:
        replayed = worker.train(batch)
    assert replayed["train/train_rollout_logprob_abs_diff_max"] < 1e-5
    assert replayed["train/ppo_kl"] == pytest.approx(0, abs=1e-7)
    # Scored under the whole distribution, the same tokens look much less likely than they were.
    whole = replace(batch, rollout_top_p_token_ids=None, rollout_top_p_token_offsets=None)
    temperature = {"rollout_temperature": SAMPLING["rollout_temperature"]}
    with running_worker(make_config(model_dir, algorithm=REPLAY | gspo, rollout=temperature, data=data)) as worker:
        assert worker.train(whole)["train/train_rollout_logprob_abs_diff"] > 0.1
