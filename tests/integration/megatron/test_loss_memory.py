"""--recompute-loss-function and --log-probs-chunk-size through the worker: the same training, without the logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo import Rank, run_ranks
from tests.support.memory import peak_bytes
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import LINEAR_ADAM, running_worker

pytestmark = pytest.mark.timeout(180)

VOCAB = 16_384
CHUNK = 16
BATCH = make_rollout(num_groups=2, group_size=8, max_response=60, fan_out=False)
# Several steps, so that the old log-probs come from a forward-only pass.
ROWS = max(sum(BATCH.response_lengths[:8]), sum(BATCH.response_lengths[8:]))
ALGORITHM = {"entropy_coef": 0.01, "use_rollout_entropy": True}


def train(rank: Rank, model_dir: Path, **flags: Any) -> tuple[int, dict[str, float]]:
    """Most bytes of the second rollout (the first makes the optimizer's state), and its numbers."""
    data = {"global_batch_size": 8, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096}
    config = make_config(model_dir, LINEAR_ADAM, algorithm=ALGORITHM, data=data, train={"precision": "fp32", **flags})
    metrics: dict[str, float] = {}
    with running_worker(config, rank) as worker:
        worker.train(BATCH)
        peak = peak_bytes(lambda: metrics.update(worker.train(replace(BATCH, rollout_id=1))))
    return peak, metrics


def test_recomputed_logits_are_never_whole(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, hidden_size=32, tie_word_embeddings=True)
    whole, want = run_ranks(1, train, model_dir)[0]
    recompute: dict[str, Any] = {"recompute_loss_function": True, "log_probs_chunk_size": CHUNK}
    chunked, found = run_ranks(1, train, model_dir, **recompute)[0]
    logits = ROWS * VOCAB * 4
    assert whole > logits
    # What is left is the gradient of the head's weight, its sum over chunks, and one chunk.
    head = VOCAB * 32 * 4
    assert chunked < 3 * head + CHUNK * VOCAB * 4 + 2_000_000
    assert chunked < whole - 0.8 * logits
    for name in ("train/loss", "train/entropy_loss", "train/ppo_kl", "rollout/log_probs", "rollout/entropy"):
        assert found[name] == pytest.approx(want[name], abs=2e-6), name
    assert found["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-5)
